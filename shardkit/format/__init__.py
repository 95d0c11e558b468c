"""The bytes on disk: bytes in, bytes out, no files and no threads."""
