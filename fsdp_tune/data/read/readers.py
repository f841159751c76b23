"""Read the rows of one file, with the line number of each. An unreadable row is returned as a `BadRow`; it does not stop the read.

A `Part` selects rows, so that several readers can share a file: every n-th row, or the lines that begin in a range of bytes.
Lines end only at \n (or \r\n): U+2028 and U+0085 are part of the text. Memory is bounded by the longest row.
"""

from __future__ import annotations
