"""The tokenizer of a run as the tokenizer.json of a folder."""

from normlab.base.errors import StoreError
from normlab.data.tokenizers import END_OF_DOCUMENT, BytesTokenizer, CharsTokenizer, SubwordTokenizer, Tokenizer

UNKNOWN = "<|unknown|>"


def end_token(tokenizer: Tokenizer) -> str:
    """Return the name of the end of a document in the tokenizer.json."""
    return getattr(tokenizer, "end_token", None) or END_OF_DOCUMENT


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer as a tokenizer.json, with the same tokens for a text without `end_token`.

    Raises:
        StoreError: Its end of a document cannot have the same number.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Definition

    if isinstance(tokenizer, SubwordTokenizer):
        if tokenizer.end_token is not None:
            return tokenizer.definition
        definition = Definition.from_str(tokenizer.definition)
    elif isinstance(tokenizer, CharsTokenizer):
        vocab = {character: token for token, character in enumerate(tokenizer.characters)}
        vocab |= {END_OF_DOCUMENT: tokenizer.end_of_document, UNKNOWN: tokenizer.unknown}
        definition = Definition(models.WordLevel(vocab, unk_token=UNKNOWN))
        definition.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        definition.decoder = decoders.Fuse()
    else:
        assert isinstance(tokenizer, BytesTokenizer)
        definition = Definition(models.BPE(_byte_names(), []))
        definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        definition.decoder = decoders.ByteLevel()
    # The library gives the new token the next number, which has to be the one of the run's model.
    definition.add_special_tokens([END_OF_DOCUMENT])
    if definition.token_to_id(END_OF_DOCUMENT) != tokenizer.end_of_document:
        raise StoreError("the tokenizer has no free number for the end of a document; export a run with another one")
    return definition.to_str()


def _byte_names() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet: a visible one is itself, the others follow."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    names = {chr(byte): byte for byte in visible}
    for index, byte in enumerate(others):
        names[chr(256 + index)] = byte
    return names
