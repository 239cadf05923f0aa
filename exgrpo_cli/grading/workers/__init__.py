"""The killable processes that run graders, and what they say to each other."""
