# SPDX-License-Identifier: Apache-2.0
"""Questions on one or two of many documents."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from .base import GeneratedTask, TaskInputs, fitting, question_sample

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
    """A generated person."""

    name: str
    birthplace: str
    trade: str
    hobby: str
    year: int
    firm: str


def names_of_people(generator: Random, count: int) -> list[str]:
    """Return `count` different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        first, last = generator.choice(_FIRST.split()), generator.choice(_LAST.split())
        name = f"{first} {last}"
        if name in found:
            name = f"{name}-{generator.choice(_LAST.split())}"
        found[name] = None
    return list(found)


class MultiDocumentQa(GeneratedTask):
    """Generated biographies and company profiles, numbered and shuffled; no model knows them.

    The layout is that of multi-document question answering in *Lost in the Middle*
    (arXiv:2307.03172): one numbered document holds the answer, the others are distractors of the
    same kind. Even samples need one document; odd ones two, as in HotpotQA (arXiv:1809.09600).
    Scored as RULER scores question answering: the answer occurs in the reply.
    """

    name = "multi_document_qa"
    title = "Multi-document QA"
    definition = (
        "Generated biographies and company profiles; even samples ask for a fact of one document, "
        "odd ones for a fact that two documents make together."
    )
    source = "after arXiv:2307.03172 and arXiv:1809.09600; generated facts"
    num_new_tokens = 12

    def sample(self, inputs: TaskInputs, index: int) -> Sample:
        """See `GeneratedTask.sample`."""
        generator = inputs.generator(self.name, index)
        world = _World(generator)
        person = world.people[0]
        if index % 2:
            answer = world.seats[person.firm]
            question = f"In which city does the company that employs {person.name} have its seat?"
            prefix = f" {person.name} works for a company that has its seat in the city of"
        else:
            answer = person.birthplace
            question = f"In which city was {person.name} born?"
            prefix = f" {person.name} was born in the city of"
        order_seed = generator.random()

        def build(count: int) -> Prompt:
            return inputs.prompts.build(
                "Read the following documents and answer the question after them.\n\n"
                + world.documents(count, Random(order_seed)),
                f"\n\nQuestion: {question}\nAnswer:",
                prefix,
            )

        prompt, distractors = fitting(build, inputs.context_tokens, what=self.name)
        return question_sample(
            index,
            prompt,
            num_new_tokens=inputs.new_tokens(self.num_new_tokens),
            answers=[answer],
            scorer="string_match_part",
            notes={"hops": 1 + index % 2, "distractors": distractors, "tokens": len(prompt)},
        )


class _World:
    """People and companies, made as far as they are asked for; the first of each matter."""

    def __init__(self, generator: Random) -> None:
        self._generator = generator
        self.seats: dict[str, str] = {}
        self.people: list[Person] = []
        self._names: set[str] = set()
        self._add()

    def _add(self) -> None:
        choose = self._generator.choice
        name = f"{choose(_FIRST.split())} {choose(_LAST.split())}"
        while name in self._names:
            name = f"{name.split()[0]} {choose(_LAST.split())}-{choose(_LAST.split())}"
        self._names.add(name)
        firm = f"{choose(_FIRMS.split())} {choose(_KINDS.split())}"
        self.seats.setdefault(firm, choose(_CITIES.split()))
        self.people.append(
            Person(
                name=name,
                birthplace=choose(_CITIES.split()),
                trade=choose(_TRADES.split()),
                hobby=choose(_HOBBIES.split()),
                year=self._generator.randint(1931, 1999),
                firm=firm,
            )
        )

    def documents(self, num_distractors: int, order: Random) -> str:
        """Return the first person's two documents among `num_distractors` others, numbered."""
        while len(self.people) <= num_distractors:
            self._add()
        person = self.people[0]
        texts = [_biography(person), _profile(person.firm, self.seats[person.firm])]
        for i, other in enumerate(self.people[1 : num_distractors + 1]):
            if i % 3 == 2 and other.firm != person.firm:
                texts.append(_profile(other.firm, self.seats[other.firm]))
            else:
                texts.append(_biography(other))
        order.shuffle(texts)
        return "\n".join(f"Document [{i}] {text}" for i, text in enumerate(texts, 1))


def _biography(person: Person) -> str:
    article = "an" if person.trade[0] in "aeiou" else "a"
    return (
        f"(Title: {person.name}) {person.name} was born in {person.year} in the city of "
        f"{person.birthplace} and became {article} {person.trade}. {person.name} works for "
        f"{person.firm} and spends free time on {person.hobby}."
    )


def _profile(firm: str, seat: str) -> str:
    return (
        f"(Title: {firm}) The company {firm} has its seat in the city of {seat}. It was founded "
        "by two cousins and makes most of what it sells itself."
    )
