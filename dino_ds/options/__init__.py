"""The options of the command line: parsing, help, and the option tables of the docs, all from the schemas."""
