"""All derived numbers, from spec, model facts and traffic lengths; it reads and writes no file."""
