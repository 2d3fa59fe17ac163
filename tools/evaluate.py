"""Measure a network of lowbit.models as it is, in float32.

    python tools/evaluate.py MODEL [--weights FILE] [--imagenet DIR] [--limit N]

Prints each figure with its standard error. DIR holds a folder of images for each class, as
ImageNet's validation set does where it is unpacked; it is read in place of the model's own data.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from lowbit.models.model import ImageModel, models, runner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=models.names())
    parser.add_argument("--weights", help="a checkpoint, .safetensors or .pth")
    parser.add_argument("--imagenet", help="folder of photographs, one folder in it a class")
    parser.add_argument("--limit", type=int, help="samples at most")
    options = parser.parse_args()
    model = models.get(options.model)
    if reason := model.absent():
        parser.error(reason)
    if options.imagenet and not isinstance(model, ImageModel):
        parser.error(f"{model.name} takes no images")
    begin = time.perf_counter()
    try:
        run = runner(model.build(options.weights))
        if options.imagenet and isinstance(model, ImageModel):
            found = model.accuracy_on(options.imagenet, run, options.limit)
        else:
            found = model.accuracy(run, options.limit)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    print(f"{model.title} ({model.source}), {time.perf_counter() - begin:.0f} s")
    for name, metric in found.items():
        print(f"  {name} {metric} of {metric.count}")


if __name__ == "__main__":
    main()
