#!/usr/bin/env python3
"""Exit code 0 where the server of this container is worth keeping alive, else 1 with the reason in one line.

Knows /health and the variables that say where it is; nothing of the package, so that it answers within moments.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

SECONDS = 4


def main() -> int:
    scheme = "https" if os.environ.get("DRAFTLOOP_TLS_CERT") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('DRAFTLOOP_PORT') or 8000}/health"
    # A certificate is made out to the name that clients use, never to this address.
    trusting = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), trusting)
    try:
        with opener.open(url, timeout=SECONDS):
            return 0
    except (urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
