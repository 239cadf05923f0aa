"""Parts of a step: rollouts graded and scored, groups and the rows that they train, guards over the journal."""
