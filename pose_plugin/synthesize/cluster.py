"""Groups of short documents on one subject, by the words they share.

TF-IDF vectors need no model, no GPU and no request, and texts on one subject share their rarer words; scikit-learn has
them well tested. Its clusterings leave groups of any size, while a row has room for a few documents only: so groups are
made greedily, each document with its nearest ones that are still free.
"""

from __future__ import annotations

from typing import Any

from pose_plugin.synthesize.documents import Document
from pose_plugin.utils.errors import PoSEError

# Below, texts share their language and no subject; above, they are copies, and there is nothing to compare.
RELATED, COPY = 0.1, 0.9
ROWS_AT_ONCE = 256


def groups(documents: list[Document], size: int, most_tokens: int) -> list[list[Document]]:
    """Groups of 2 to `size` documents, no document twice, each of at most `most_tokens` tokens together."""
    if len(documents) < 2:
        return []
    vectors = _vectors([document.text for document in documents])
    free = set(range(len(documents)))
    found = []
    for start in range(0, len(documents), ROWS_AT_ONCE):
        block = (vectors[start : start + ROWS_AT_ONCE] @ vectors.T).toarray()
        for seed in range(start, min(start + ROWS_AT_ONCE, len(documents))):
            if seed in free:
                group = _around(seed, block[seed - start], vectors, documents, free, size, most_tokens)
                if len(group) > 1:
                    free -= set(group)
                    found.append([documents[i] for i in group])
    return found


def _around(
    seed: int,
    similarity: Any,
    vectors: Any,
    documents: list[Document],
    free: set[int],
    size: int,
    most_tokens: int,
) -> list[int]:
    group, tokens = [seed], documents[seed].tokens
    for other in sorted(free - {seed}, key=lambda i: (-similarity[i], i)):
        if similarity[other] < RELATED or len(group) == size:
            break
        is_copy = (vectors[group] @ vectors[other].T).max() > COPY
        if not is_copy and tokens + documents[other].tokens <= most_tokens:
            group.append(other)
            tokens += documents[other].tokens
    return group


def _vectors(texts: list[str]) -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise PoSEError('the task compare needs scikit-learn: pip install "pose-plugin[synthesize]"') from None
    # Runs of characters within words serve languages that write without spaces, too.
    words = TfidfVectorizer(analyzer="char_wb", ngram_range=(4, 5), sublinear_tf=True, max_features=1 << 17)
    return words.fit_transform(texts)
