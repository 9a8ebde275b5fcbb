"""Readable names for C++ symbols: the part of the Itanium ABI that libraries like torch use.

Functions with their parameters, nested names, templates, substitutions, pointers, references, qualifiers and the
special names (vtable, typeinfo). A name that goes beyond comes back as it is: a report must never fail for its prose.
"""

from __future__ import annotations

_BUILTIN = {
    "v": "void", "w": "wchar_t", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char", "s": "short",
    "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long", "x": "long long",
    "y": "unsigned long long", "n": "__int128", "o": "unsigned __int128", "f": "float", "d": "double",
    "e": "long double", "g": "__float128", "z": "...",
}  # fmt: skip
_BUILTIN_D = {"n": "std::nullptr_t", "i": "char32_t", "s": "char16_t", "u": "char8_t", "a": "auto", "h": "_Float16"}
_STANDARD = {
    "t": "std", "a": "std::allocator", "b": "std::basic_string", "s": "std::string", "i": "std::istream",
    "o": "std::ostream", "d": "std::iostream",
}  # fmt: skip
_OPERATORS = {
    "nw": "new", "na": "new[]", "dl": "delete", "da": "delete[]", "ps": "+", "ng": "-", "ad": "&", "de": "*", "co": "~",
    "pl": "+", "mi": "-", "ml": "*", "dv": "/", "rm": "%", "an": "&", "or": "|", "eo": "^", "aS": "=", "pL": "+=",
    "mI": "-=", "mL": "*=", "dV": "/=", "rM": "%=", "aN": "&=", "oR": "|=", "eO": "^=", "ls": "<<", "rs": ">>",
    "lS": "<<=", "rS": ">>=", "eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "nt": "!",
    "aa": "&&", "oo": "||", "pp": "++", "mm": "--", "cm": ",", "pm": "->*", "pt": "->", "cl": "()", "ix": "[]",
}  # fmt: skip
_SPECIAL = {"V": "vtable for ", "T": "VTT for ", "I": "typeinfo for ", "S": "typeinfo name for "}
_LITERALS = {
    "int": "", "unsigned int": "u", "long": "l", "unsigned long": "ul", "long long": "ll", "unsigned long long": "ull",
}  # fmt: skip
_MOST_LENGTH = 8192
_MOST_DEPTH = 60


class _Beyond(Exception):
    """A construct that this demangler does not know."""


def demangle(symbol: str) -> str:
    """The name as C++ writes it, or `symbol` itself where it is no mangled name or goes beyond what is known here."""
    if not symbol.startswith("_Z") or len(symbol) > _MOST_LENGTH:
        return symbol
    try:
        parser = _Parser(symbol)
        return parser.symbol() or symbol
    except (_Beyond, IndexError, ValueError, RecursionError):
        return symbol


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 2
        self.known: list[str] = []
        self.arguments: list[str] = []
        self.depth = 0
        self.template = False
        self.constness = ""

    def take(self, prefix: str) -> bool:
        if self.text.startswith(prefix, self.at):
            self.at += len(prefix)
            return True
        return False

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def symbol(self) -> str:
        if self.peek() == "T" and self.text[self.at + 1 : self.at + 2] in _SPECIAL:
            kind = self.text[self.at + 1]
            self.at += 2
            return _SPECIAL[kind] + self.type()
        if self.take("GV"):
            return "guard variable for " + self.name()
        name = self.name()
        constness, template = self.constness, self.template
        if self.at >= len(self.text) or self.peek() == ".":
            return name
        is_special = name.rsplit("::", 1)[-1].lstrip("~") == name.rsplit("::", 2)[-2] if name.count("::") else False
        returns = ""
        if template and not is_special:
            returns = self.type() + " "
        parameters = []
        while self.at < len(self.text) and self.peek() not in (".", "E"):
            parameters.append(self.type())
        if self.at < len(self.text) and self.peek() != ".":
            raise _Beyond
        shown = "" if parameters == ["void"] else ", ".join(parameters)
        return f"{returns}{name}({shown}){constness}"

    # -- names ------------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise _Beyond
        try:
            return self._name()
        finally:
            self.depth -= 1

    def _name(self) -> str:
        self.template, self.constness = False, ""
        if self.take("N"):
            return self._nested()
        if self.peek() == "Z":
            raise _Beyond
        if self.take("St"):
            name = f"std::{self._unqualified('')}"
            is_known = False
        elif self.peek() == "S":
            name, is_known = self._substitution(), True
        else:
            name, is_known = self._unqualified(""), False
        if self.peek() == "I":
            if not is_known:
                self.known.append(name)
            name += self._template_arguments()
            self.template = True
        return name

    def _nested(self) -> str:
        qualifiers = ""
        while self.peek() in "rVK" and self.peek():
            qualifiers = {"r": " restrict", "V": " volatile", "K": " const"}[self.text[self.at]] + qualifiers
            self.at += 1
        if self.take("R"):
            qualifiers += " &"
        elif self.take("O"):
            qualifiers += " &&"
        name, last, is_template = "", "", False
        while not self.take("E"):
            here = self.peek()
            is_template = False
            if here == "S" and self.text[self.at + 1] != "t":
                name = last = self._substitution()
                continue
            if here == "T":
                name = last = self._parameter()
            elif here == "I":
                name += self._template_arguments()
                is_template = True
            elif self.take("St"):
                name = last = "std"
                continue
            else:
                last = self._unqualified(last)
                name = f"{name}::{last}" if name else last
            self.known.append(name)
        if self.known and name == self.known[-1]:
            self.known.pop()  # the whole name is a candidate only where it is used as a type
        self.template, self.constness = is_template, qualifiers
        return name

    def _unqualified(self, scope: str) -> str:
        here = self.peek()
        if here.isdigit():
            return self._tagged(self._source_name())
        if here == "L":
            self.at += 1
            return self._unqualified(scope)
        if here == "C" and self.text[self.at + 1] in "1234":
            self.at += 2
            return _bare(scope)
        if here == "D" and self.text[self.at + 1] in "01245":
            self.at += 2
            return "~" + _bare(scope)
        if self.take("cv"):
            return "operator " + self.type()
        code = self.text[self.at : self.at + 2]
        if code in _OPERATORS:
            self.at += 2
            sign = _OPERATORS[code]
            return self._tagged(f"operator{' ' if sign[0].isalpha() else ''}{sign}")
        raise _Beyond

    def _tagged(self, name: str) -> str:
        while self.take("B"):
            name += f"[abi:{self._source_name()}]"
        return name

    def _source_name(self) -> str:
        length = self._number()
        if length <= 0 or self.at + length > len(self.text):
            raise _Beyond
        name = self.text[self.at : self.at + length]
        self.at += length
        return "(anonymous namespace)" if name.startswith("_GLOBAL__N") else name

    def _number(self) -> int:
        start = self.at
        while self.peek().isdigit():
            self.at += 1
        return int(self.text[start : self.at])

    def _sequence(self) -> int:
        """`_` is 0, `0_` is 1, ... in base 36."""
        start = self.at
        while self.peek() != "_":
            if not self.peek():
                raise _Beyond
            self.at += 1
        digits = self.text[start : self.at]
        self.at += 1
        return int(digits, 36) + 1 if digits else 0

    def _substitution(self) -> str:
        self.at += 1
        here = self.peek()
        if here in _STANDARD and here:
            self.at += 1
            return self._tagged(_STANDARD[here])
        return self.known[self._sequence()]

    def _parameter(self) -> str:
        self.at += 1
        return self.arguments[self._sequence()]

    def _template_arguments(self) -> str:
        self.at += 1
        found: list[str] = []
        while not self.take("E"):
            found += self._template_argument()
        self.arguments = found
        return f"<{', '.join(found)}>"

    def _template_argument(self) -> list[str]:
        if self.take("J"):
            pack = []
            while not self.take("E"):
                pack += self._template_argument()
            return pack
        if self.take("L"):
            if self.take("_Z"):
                raise _Beyond
            kind = self.type()
            sign = "-" if self.take("n") else ""
            start = self.at
            while self.peek() != "E":
                if not self.peek():
                    raise _Beyond
                self.at += 1
            value = sign + self.text[start : self.at]
            self.at += 1
            if kind == "bool":
                return [{"0": "false", "1": "true"}.get(value, value)]
            return [value + _LITERALS[kind] if kind in _LITERALS else f"({kind}){value}"]
        if self.peek() == "X":
            raise _Beyond
        return [self.type()]

    # -- types ------------------------------------------------------------------------------------------------------

    def type(self) -> str:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise _Beyond
        try:
            return self._type()
        finally:
            self.depth -= 1

    def _type(self) -> str:
        here = self.peek()
        for code, shown in (("P", "*"), ("R", "&"), ("O", "&&")):
            if here == code:
                self.at += 1
                return self._known(_decorate(self.type(), shown))
        if here in ("K", "V", "r") and here:
            self.at += 1
            word = {"K": "const", "V": "volatile", "r": "restrict"}[here]
            return self._known(f"{self.type()} {word}")
        if here == "F":
            return self._known(self._function())
        if here == "A":
            self.at += 1
            count = str(self._number()) if self.peek().isdigit() else ""
            if not self.take("_"):
                raise _Beyond
            return self._known(f"{self.type()} [{count}]")
        if here == "T":
            return self._with_arguments(self._known(self._parameter()))
        if here == "D":
            return self._d_type()
        if here == "S" and self.text[self.at + 1] != "t":
            name = self._substitution()
            if self.peek() == "I":
                return self._known(name + self._template_arguments())
            return name
        if here in _BUILTIN and here:
            self.at += 1
            return _BUILTIN[here]
        if here == "N" or here == "S" or here.isdigit():
            saved = self.template, self.constness
            name = self.name()
            self.template, self.constness = saved
            return self._known(name)
        raise _Beyond

    def _with_arguments(self, name: str) -> str:
        return self._known(name + self._template_arguments()) if self.peek() == "I" else name

    def _d_type(self) -> str:
        following = self.text[self.at + 1]
        if following in _BUILTIN_D:
            self.at += 2
            return _BUILTIN_D[following]
        if following == "p":
            self.at += 2
            return f"{self.type()}..."
        raise _Beyond

    def _function(self) -> str:
        self.at += 1
        self.take("Y")
        returns = self.type()
        parameters = []
        while not self.take("E"):
            parameters.append(self.type())
        shown = "" if parameters == ["void"] else ", ".join(parameters)
        return f"{returns} ({shown})"

    def _known(self, name: str) -> str:
        self.known.append(name)
        return name


def _bare(scope: str) -> str:
    return scope.partition("<")[0].rsplit("::", 1)[-1]


def _decorate(name: str, sign: str) -> str:
    """A pointer to a function has its sign inside: `void (*)(int)`."""
    if name.endswith(")") and " (" in name and not name.startswith("("):
        returns, _, parameters = name.partition(" (")
        if "<" not in returns:
            if parameters.startswith(("*", "&")):
                return f"{returns} ({sign}{parameters}"
            return f"{returns} ({sign})({parameters}"
    return name + sign
