"""From response text to verdict: graders and the killable workers that run them."""
