"""Benchmarks, the evaluation runner, and the statistics of a score.

A benchmark's way, module by module: its preset and its questions (`benchmarks`), a model that answers (`local`, or
`server`; `models` finds it by name), sampling, grading and the record of it (`sampling`), what is kept, and its scores
(`results`), tables of one model or several (`comparison`). `service` runs all of it. `preparing` is `exgrpo prepare`,
which can leave out questions of benchmarks.

A grader gives a `Verdict`, of which only CORRECT counts; scores are statistics of these. A new rule of what is correct
is a grader (`exgrpo_cli/grading/routes.py`), named by `protocol.grader` of the preset. A new statistic goes to
`base/statistics.py`, into `sampling.Evaluation.figures` and to the tables that show it. Partial credit has no place.
"""
