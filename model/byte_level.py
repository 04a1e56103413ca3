"""Bytes <-> the printable characters in which byte-level vocabularies spell them."""


def _byte_of_character() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for the characters from U+0100 on.

    Source: GPT-2, "Language Models are Unsupervised Multitask Learners", section 2.2, and
    the vocabularies published with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def spelled(data: bytes) -> str:
    """One character a byte."""
    return data.decode("latin-1").translate(_CHARACTER_OF_BYTE)


def token_bytes(token: str) -> bytes:
    """The bytes of a token; one with any other character is an added token, spelled as it is."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()
