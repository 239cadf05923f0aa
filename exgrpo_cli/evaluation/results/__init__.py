"""What an evaluation leaves in its folder, and what is read from it again."""
