"""`exgrpo report`: the page of a run or a study."""

from pathlib import Path

from exgrpo_cli.commands.cli import print_json, talk, with_options, write_data


@with_options
def report(folder: Path, output: Path | None = None, json: bool = False, debug: bool = False) -> None:
    """Write one self-contained page about a run or a study: results, figures, responses, settings, versions.

    Needs neither a GPU nor a model nor the network; a running or broken run gets the page that its files allow.

    \b
    Examples:
      exgrpo report runs/exgrpo-tiny
      exgrpo report studies/metric-ent --output metric-ent.html
    """
    import pyarrow as pa

    from exgrpo_cli.base.errors import InputError
    from exgrpo_cli.base.files import require_place, require_writable
    from exgrpo_cli.show.report import write_report

    if "jemalloc" in pa.supported_memory_backends():
        # It gives back what the ledger's tables took, which pyarrow's usual one keeps: a seventh of the peak.
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    if output is not None:
        require_place(output)
        require_writable(output)
        if output.is_file():
            with output.open("rb") as file:
                if file.read(14).lower() != b"<!doctype html":
                    raise InputError(f"--output {output} exists and is no page: name another file.")
    path = write_report(folder, output)
    print_json({"report": str(path)}) if json else write_data(str(path))


def write_page(folder: Path, *, quiet: bool) -> None:
    """The page that a run or a study ends with. Where it cannot be written a line says so: the work itself is done.

    Raises Interrupted, which says how to get the page.
    """
    from exgrpo_cli.base.errors import ExgrpoError, Interrupted
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.show.report import write_report

    try:
        with make_reporter(quiet=quiet) as reporter:
            reporter.phase("writing the page")
            path = write_report(folder)
        talk(f"report: {path}", quiet=quiet)
    except ExgrpoError as error:
        talk(f"exgrpo: no report: {error}")
    except KeyboardInterrupt:
        how = f"write it with: exgrpo report {folder}"
        raise Interrupted(f"stopped while the page was written, all else is there; {how}") from None
