"""Other tools' index files, made from a dataset's index table: no payload is read."""
