"""Private names of libraries, one module for each library. The rest of the package uses public names only."""
