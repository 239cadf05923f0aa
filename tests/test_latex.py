"""Tables of a study and of an evaluation are LaTeX: pdflatex sets them."""

import shutil
import subprocess
from pathlib import Path

import pytest
from made_results import write_claim_results
from stored_results import RIGHT, WRONG, question, record, stored

from exgrpo_cli.commands import run

ODD_NAMES = ["a_50%", "[base] #1 & co", "C:\\models\\~x^2 {$y$} <p|q>", "café – naïve →"]
PAGE = r"""
\documentclass{article}
\usepackage[a4paper, landscape, margin=1cm]{geometry}
\usepackage{booktabs}
\begin{document}
\input{study/table.tex}

\bigskip
\input{evaluation/table.tex}
\end{document}
"""


@pytest.mark.slow
def test_tables_of_a_study_and_of_an_evaluation_are_set_by_pdflatex(tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        # No failure: a Debian package of hundreds of MB that no environment of the project holds, for a test that is
        # run by hand where somebody has it.
        pytest.skip("no pdflatex on the path (Debian: apt-get install texlive-latex-base)")
    carried = write_claim_results(tmp_path / "carried", "replay-beats-on-policy", method="exgrpo")
    study = ["ablate", "--claim", "replay-beats-on-policy", "--results", str(carried), "--quiet"]
    assert run([*study, "--output", str(tmp_path / "study")]) == 0
    folders = [tmp_path / f"model-{number}" for number in range(len(ODD_NAMES))]
    for folder, name in zip(folders, ODD_NAMES, strict=True):
        for benchmark in ("aime24", "math500"):
            right = record(question(1), ("4", RIGHT), ("5", WRONG))
            stored(folder / benchmark, [right], benchmark__name=benchmark, model__name=name, model__hash=name)
    evaluation = ["evaluate", "--compare", *map(str, folders), "--quiet"]
    assert run([*evaluation, "--output", str(tmp_path / "evaluation")]) == 0

    (tmp_path / "page.tex").write_text(PAGE)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout and "Missing character" not in (tmp_path / "page.log").read_text("latin-1")
    if shutil.which("pdftotext") is not None:
        text = subprocess.run(["pdftotext", "-layout", "page.pdf", "-"], cwd=tmp_path, capture_output=True, text=True)
        for words in ("strong: exgrpo", "p (Holm)", "[base] #1 & co", "C:\\models\\", "<p|q>", "50.0"):
            assert words in text.stdout
