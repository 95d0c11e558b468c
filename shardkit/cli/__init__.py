"""The commands: each parses, makes one library call and renders what came back."""
