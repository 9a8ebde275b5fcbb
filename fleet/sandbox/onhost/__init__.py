"""Files that are installed on sandbox hosts: standard library only, each complete in itself."""
