"""One module for each library that is measured, with a class named Head."""
