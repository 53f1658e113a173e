"""One file per framework. Nothing in the package imports these at module level."""
