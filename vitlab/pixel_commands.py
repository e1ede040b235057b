"""What the commands of an ImageGPT's pixels do."""

from rich.console import Console

from vitlab.outputs import SKIPPED_SOME, check_outputs
from vitlab.pixel_options import CompleteOptions, PaletteOptions, SampleOptions
from vitlab.text import progress_bar, say


def palette(options: PaletteOptions) -> int:
    """`vitlab palette`: fit colours to a data set, measure them, and write them and a picture."""
    from vitlab.inference.palette import make_palette

    console = Console()
    check_outputs(palette=options.out)
    with progress_bar(console) as progress:
        report = make_palette(options, say=lambda line: say(console, line), progress=progress)
    say(console, f"{report.held_out_split} (held out): {report.held_out.describe()}")
    say(console, f"{options.split} (fitted): {report.fitted.describe()}")
    for error in report.errors:
        say(console, f"skipped {error}")
    say(console, f"palette: {options.out}")
    say(console, f"picture: {report.picture}")
    return SKIPPED_SOME if report.errors else 0


def sample(options: SampleOptions) -> int:
    """`vitlab sample`: draw images with an ImageGPT, and write them as one picture."""
    from vitlab.inference.pictures import draw_samples

    console = Console()
    check_outputs(picture=options.out, npy=options.npy)
    with progress_bar(console) as progress:
        drawing = draw_samples(options, progress=progress)
    say(console, f"{drawing.count} images {'found' if options.beam else 'drawn'}: {options.out}")
    return 0


def complete(options: CompleteOptions) -> int:
    """`vitlab complete`: draw the lower part of images anew, and write all as one picture."""
    from vitlab.inference.pictures import complete_images

    console = Console()
    check_outputs(picture=options.out, npy=options.npy)
    with progress_bar(console) as progress:
        drawing = complete_images(options, progress=progress)
    for error in drawing.errors:
        say(console, f"unreadable: {error}")
    say(console, f"{drawing.count} completions drawn, {len(drawing.errors)} images unreadable: {options.out}")
    return SKIPPED_SOME if drawing.errors else 0
