# SPDX-License-Identifier: Apache-2.0
"""Questions on one or two of many generated biographies and company profiles; no model knows them.

The layout is that of multi-document question answering in *Lost in the Middle* (arXiv:2307.03172):
one numbered document holds the answer, the others are distractors of the same kind. Even samples
need one document; odd ones two, as in HotpotQA (arXiv:1809.09600). Scored as RULER scores question
answering: the answer occurs in the reply.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from .base import Task, TaskInputs, fitting, one_by_one, question_sample

_NAME = "multi_document_qa"
_FIRST = "Ada Boris Carla Daniel Elena Felix Greta Hugo Irene Jonas Karin Leon Mara Nils Olga Paul"
_LAST = (
    "Abbott Brandt Castro Dalton Ekberg Farrow Galvan Hobart Ibsen Jansen Keller Lindqvist Moreau "
    "Novak Ortega Penrose Quinn Rossi Sandoval Thorne Ulrich Vasquez Whitaker Yates Zimmer"
)
_CITIES = (
    "Accra Bergen Cusco Dakar Essen Fargo Ghent Hobart Izmir Jaipur Kobe Leeds Malmo Nantes Osaka "
    "Porto Quito Riga Salta Turin Utrecht Varna Windhoek Yerevan Zagreb"
)
_TRADES = "baker botanist carpenter chemist dentist engineer geologist glazier pilot surveyor"
_HOBBIES = "archery chess diving fencing juggling origami painting rowing sailing weaving"
_FIRMS = (
    "Alder Birch Cedar Dogwood Elder Fir Ginkgo Hazel Ivy Juniper Larch Maple Nettle Oak Pine "
    "Rowan Spruce Teak Willow Yew"
)
_KINDS = "Bearings Ceramics Instruments Optics Paper Pumps Shipping Textiles Tools Works"


class Person(NamedTuple):
    """A generated person; `seat` is that of the firm."""

    name: str
    firm: str
    seat: str
    birthplace: str
    trade: str
    hobby: str
    year: int


def names_of_people(generator: Random, count: int) -> list[str]:
    """Return `count` different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        name = f"{generator.choice(_FIRST.split())} {generator.choice(_LAST.split())}"
        if name in found:
            name = f"{name}-{generator.choice(_LAST.split())}"
        found[name] = None
    return list(found)


def _sample(inputs: TaskInputs, index: int) -> Sample:
    generator = inputs.generator(_NAME, index)
    people = _people(generator)
    known = [next(people)]
    person, order_seed = known[0], generator.random()
    if index % 2:
        answer = person.seat
        question = f"In which city does the company that employs {person.name} have its seat?"
        prefix = f" {person.name} works for a company that has its seat in the city of"
    else:
        answer = person.birthplace
        question = f"In which city was {person.name} born?"
        prefix = f" {person.name} was born in the city of"

    def build(num_distractors: int) -> Prompt:
        known.extend(itertools.islice(people, max(0, num_distractors + 1 - len(known))))
        documents = _documents(person, known[1 : num_distractors + 1], Random(order_seed))
        return inputs.prompts.build(
            f"Read the following documents and answer the question after them.\n\n{documents}",
            f"\n\nQuestion: {question}\nAnswer:",
            prefix,
        )

    prompt, distractors = fitting(build, inputs.context_tokens, what=_NAME)
    return question_sample(
        inputs, index, prompt, [answer],
        num_new_tokens=12, scorer="string_match_part", hops=1 + index % 2, distractors=distractors,
    )  # fmt: skip


def _people(generator: Random) -> Iterator[Person]:
    """Make people without end; a firm has one seat, whoever works there."""
    choose = generator.choice
    seats: dict[str, str] = {}
    names: set[str] = set()
    while True:
        name = f"{choose(_FIRST.split())} {choose(_LAST.split())}"
        while name in names:
            name = f"{name.split()[0]} {choose(_LAST.split())}-{choose(_LAST.split())}"
        names.add(name)
        firm = f"{choose(_FIRMS.split())} {choose(_KINDS.split())}"
        yield Person(
            name=name,
            firm=firm,
            seat=seats.setdefault(firm, choose(_CITIES.split())),
            birthplace=choose(_CITIES.split()),
            trade=choose(_TRADES.split()),
            hobby=choose(_HOBBIES.split()),
            year=generator.randint(1931, 1999),
        )


def _documents(person: Person, others: Sequence[Person], order: Random) -> str:
    """Return the two documents of a person among one of each of the others, numbered."""
    texts = [_biography(person), _profile(person)]
    for i, other in enumerate(others):
        is_profile = i % 3 == 2 and other.firm != person.firm
        texts.append(_profile(other) if is_profile else _biography(other))
    order.shuffle(texts)
    return "\n".join(f"Document [{i}] {text}" for i, text in enumerate(texts, 1))


def _biography(person: Person) -> str:
    article = "an" if person.trade[0] in "aeiou" else "a"
    return (
        f"(Title: {person.name}) {person.name} was born in {person.year} in the city of "
        f"{person.birthplace} and became {article} {person.trade}. {person.name} works for "
        f"{person.firm} and spends free time on {person.hobby}."
    )


def _profile(person: Person) -> str:
    return (
        f"(Title: {person.firm}) The company {person.firm} has its seat in the city of "
        f"{person.seat}. It was founded by two cousins and makes most of what it sells itself."
    )


MULTI_DOCUMENT_QA = Task(
    name=_NAME,
    title="Multi-document QA",
    definition="Generated biographies and company profiles; even samples ask for a fact of one "
    "document, odd ones for a fact that two documents make together.",
    source="after arXiv:2307.03172 and arXiv:1809.09600; generated facts",
    samples=one_by_one(_sample),
)
