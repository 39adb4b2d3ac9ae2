"""The page's scripts, run in a JavaScript engine with a document, a fetch and a clock of the test's own."""

import asyncio
import re
from typing import Any

import dukpy
import pytest
from control_nodes import coordinator

from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.contributions import contributions
from atoll.coordinator.monitor.http import PAGE_FILE, snapshot
from atoll.coordinator.state_machine import credit
from atoll.coordinator.state_machine.credit import CreditBook, Work
from atoll.coordinator.state_machine.state import State

ROUNDS = 100_000
MAX_BUCKETS = 1024  # of a curve; of each bucket four points at most are drawn
LEFT, RIGHT, TOP, BOTTOM = 55, 890, 12, 205  # of the picture's axes
SCRIPTS = re.findall(r"<script.*?>(.*?)</script>", PAGE_FILE.read_text(), re.DOTALL)
BROWSER = """
function element(tag){
 const children=[];
 return {tag,children,cells:children,style:{},textContent:"",className:"",hidden:false,html:"",drawings:0,
  append(child){children.push(child);child.remove=()=>children.splice(children.indexOf(child),1)},
  insertCell(){this.append(element("td"))},
  get lastChild(){return children[children.length-1]},
  set innerHTML(html){this.html=html;this.drawings++}}}
const elements={},timers=[];
let records=[],clock=0,asked=0;
globalThis.document={createElement:element,getElementById:id=>elements[id]=elements[id]||element(id)};
globalThis.performance={now:()=>clock+=100};
globalThis.setTimeout=action=>timers.push(action);
globalThis.fetch=async path=>{
 const since=path.match(/since=([0-9]+)&limit=([0-9]+)/);
 if(path.startsWith("api/contributions")){asked++;return {json:async()=>dukpy.contributions}}
 return {json:async()=>since?records.slice(+since[1],+since[1]+ +since[2]):dukpy.run}};
"""


class Page:
    """The page as it was loaded, with what its coordinator answers."""

    def __init__(self, run: dict[str, Any], records: str) -> None:
        """`records`: JavaScript, an array in which round k is at place k - 1."""
        self.engine, self.run = dukpy.JSInterpreter(), run
        self.contributions = contributions(State(RunConfig()), "reef")
        self.evaluate(f"{BROWSER};records={records}")
        self.evaluate("\n".join(SCRIPTS))

    def evaluate(self, code: str) -> Any:
        return self.engine.evaljs(code, run=self.run, contributions=self.contributions)

    @property
    def picture(self) -> str:
        return str(self.evaluate("elements.loss.html"))

    @property
    def drawings(self) -> int:
        return int(self.evaluate("elements.loss.drawings"))

    def look_again(self) -> None:
        """Its timer fires."""
        self.evaluate("timers.splice(0).forEach(action=>action());0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `api/run` answers in a run with one member."""

    async def story() -> dict[str, Any]:
        async with coordinator(tmp_path_factory.mktemp("state")) as c:
            await c.node().at_work()
            return snapshot(c.event_loop, "reef")

    return asyncio.run(story())


def curves(picture: str) -> list[list[tuple[float, float]]]:
    """The points of the picture's curves."""
    lines = re.findall(r'<polyline.*? points="(.*?)"', picture)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in lines]


def test_a_hundred_thousand_rounds_are_drawn_in_a_picture_of_bounded_size(run: dict[str, Any]) -> None:
    losses = "train_loss:i==777?9:3+Math.sin(i/100),val_loss:i%10?null:2.5"
    page = Page(run, f"Array.from({{length:{ROUNDS}}},(_,i)=>({{round:i+1,{losses}}}))")
    assert page.evaluate("last") == ROUNDS
    assert page.evaluate("elements.phase.textContent").startswith("Round ")
    train, validation = curves(page.picture)
    for curve in (train, validation):
        assert MAX_BUCKETS / 2 < len(curve) <= 4 * MAX_BUCKETS
        assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in curve)
        assert curve == sorted(curve, key=lambda point: point[0]) and curve[-1][0] > RIGHT - 1
    assert min(y for _, y in train) == TOP, "one round in a hundred thousand, and still to be seen"
    assert max(y for _, y in train) == BOTTOM
    pages = ROUNDS / 1000 + 1
    assert 1 < page.drawings < pages, "while it loads, and not at every page"


def test_a_picture_is_drawn_for_what_is_new_only(run: dict[str, Any]) -> None:
    page = Page(run, "[{round:1,train_loss:3,val_loss:null},{round:2,train_loss:2,val_loss:2.5}]")
    before, picture = page.drawings, page.picture
    for _ in range(5):
        page.look_again()
    assert (page.drawings, page.picture) == (before, picture)
    page.evaluate("records.push({round:3,train_loss:1,val_loss:null});0")
    page.look_again()
    assert page.drawings == before + 1 and page.picture != picture
    page.look_again()
    assert page.drawings == before + 1


@pytest.mark.parametrize("value", ["null", "undefined", "NaN", "Infinity", "-Infinity", "1e300", "-1e300", "0"])
def test_a_loss_that_is_none_or_far_out_does_not_break_the_picture(run: dict[str, Any], value: str) -> None:
    losses = ["3", "2.5", value, "2"]
    records = ",".join(f"{{round:{k},train_loss:{loss},val_loss:{value}}}" for k, loss in enumerate(losses, 1))
    page = Page(run, f"[{records}]")
    assert page.evaluate("last") == len(losses) and not re.search("NaN|Infinity|null|undefined", page.picture)
    train = curves(page.picture)[0]
    assert len(train) >= 3 and all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in train)


def test_without_a_loss_there_is_no_picture(run: dict[str, Any]) -> None:
    assert Page(run, "[{round:1,train_loss:null,val_loss:null}]").picture == ""


def test_contributions_are_asked_for_after_a_commit_and_names_are_shown_as_text(run: dict[str, Any]) -> None:
    name, owner = "<img src=x onerror=alert(1)>", "the <b>institute</b>"
    page, book = Page(run, "[]"), CreditBook()
    assert page.evaluate("elements.contributions.hidden") and page.evaluate("asked") == 1
    book = credit.enter(book, 1, [Work("key", NodeId("n1"), "ada", owner, 40)], 0)
    book = credit.enter(book, 2, [Work("key", NodeId("n1"), name, owner, 60)], 0)
    page.contributions = contributions(State(RunConfig(), tokens=100, committed=2, credit=book), "reef")
    page.look_again()
    assert page.evaluate("asked") == 1, "nothing was committed since"
    page.run = run | {"committed": 2, "tokens": 100}
    page.look_again()
    page.look_again()
    assert page.evaluate("asked") == 2 and not page.evaluate("elements.contributions.hidden")
    cells = "rows=>rows.children.map(row=>row.cells.map(cell=>cell.textContent))"
    assert page.evaluate(f"({cells})(elements.owners)") == [[owner, "1", "2", "100", "100.0 %"]]
    assert page.evaluate(f"({cells})(elements.nodes)") == [
        [f"{name} (n1), once ada", owner, "2", "100", "100.0 %"]
    ]
    written = "rows=>rows.children.map(row=>row.cells.map(cell=>cell.html).join('')).join('')"
    assert page.evaluate(f"({written})(elements.owners)") == page.evaluate(f"({written})(elements.nodes)") == ""
