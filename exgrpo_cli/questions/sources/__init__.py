"""From what the user typed to the rows of local files: files, folders, data sets of the hub."""
