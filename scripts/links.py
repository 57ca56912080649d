#!/usr/bin/env python3
"""Check that every local link and source in the HTML files below a folder leads to a file and an anchor."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self):
        super().__init__()
        self.targets, self.anchors = [], {""}

    def handle_starttag(self, tag, attrs):
        """Collect `href`, `src` and `id`."""
        values = dict(attrs)
        self.targets += [values[name] for name in ("href", "src") if values.get(name)]
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))


def main():
    """Exit 1 with the broken links, 2 if nothing was checked."""
    root = Path(sys.argv[1])
    pages = {}
    for path in root.rglob("*.html"):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    broken, checked = [], 0
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            checked += 1
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if file.is_dir():
                file = file / "index.html" if (file / "index.html").exists() else file
            anchors = pages[file].anchors if file in pages else {url.fragment}
            if not file.exists() or unquote(url.fragment) not in anchors:
                broken.append(f"{path.relative_to(root.resolve())}: {target}")
    print("\n".join(sorted(set(broken))))
    if not checked:
        print(f"no links were found below {root}", file=sys.stderr)
        return 2
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
