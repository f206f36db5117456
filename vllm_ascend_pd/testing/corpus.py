# SPDX-License-Identifier: Apache-2.0
"""The text that the test model's tokenizer is trained on: prose of this field, and common words."""

from __future__ import annotations

PROSE = """
A language model writes one token at a time. Before it can write the first one it has to read
the whole prompt: this is the prefill, and it keeps the processor busy. Each token after that is
a decode step, which reads all of the weights and all of the cache to produce a single token,
and so it waits for memory most of the time. When both run on the same machine a long prompt
makes every other user wait. The cure is to run them apart: some engines only do prefill, others
only decode, and the keys and values travel between them over the network.

The cache is cut into blocks of a fixed number of tokens. A block that is full has a hash, made
from its tokens and from the hash of the block before it, and two requests that begin with the
same words share the same blocks. When memory runs out the scheduler evicts the block that was
not used for the longest time. A pool in slower memory keeps what was evicted: first the memory
of the host, then a local disk, then the memory of other hosts. If a load fails, nothing is lost
but time. The engine finds the last good block, throws away those after it, and computes them
again. A wrong token must never reach the user.

Producers hold their blocks under a lease. The consumer renews it with a heartbeat while the
transfer runs, and releases it when the last layer has arrived. If the consumer dies, the lease
expires and the blocks return to the free list. Every wait has a deadline; every request ends in
tokens or in a clear error. The router sends a new request to the engine with the shortest
queue, or to the one that already knows most of its prefix, and when an engine stops answering,
it picks another one and tries again.

Once upon a time there was a small engine that lived near the sea. Every morning it read the
newspaper, drank a cup of strong coffee, and began to answer letters. People asked about the
weather, about history and music, about how to bake bread and how to mend a broken heart. "What
is the capital of France?" they asked, and "Why is the sky blue?" and "Could you explain it to
me again, please, as if I were five years old?" It answered them all, one word after another,
never in a hurry. Some questions were long: whole books, with a single line at the end. Then the
engine would call its older sister across the river, who could read very quickly, and she would
send over what she had learned, page by page, before she had even finished the chapter. Hello,
my name is Ada, and I am writing to you from the mountains. The quick brown fox jumps over the
lazy dog. All human beings are born free and equal in dignity and rights. To be, or not to be,
that is the question. It was the best of times, it was the worst of times. Call me when you
arrive. The president of the United States is elected every four years. The future of artificial
intelligence is open source, and it belongs to everyone who helps to build it.

def transfer(blocks, source, target):
    for index, block in enumerate(blocks):
        if block is None or not block.valid:
            raise ValueError("block %d is missing" % index)
        target.write(block.address, source.read(block.address, block.size))
    return len(blocks)

{"model": "tiny", "prompt": "Hello", "max_tokens": 16, "temperature": 0.0, "stream": true}
"""

WORDS = """
able about above accept across action active actual address advance afternoon again against
agree ahead allow almost alone along already although always amount ancient animal another
answer anyone appear apple area argue around arrive article artist aspect assume attack attempt
attend author autumn available average avoid awake balance basic battle beach beautiful because
become bedroom before behave behind believe below benefit beside better between beyond bicycle
biology bird bitter black blanket board border borrow bottle bottom branch brave bread breakfast
bridge bright bring brother brown budget builder burden business butter button camera campaign
cancel candle capable captain carbon careful carpet carry castle catch cause ceiling center
central century certain chain chair challenge chance change channel character charge cheap check
cheese chemical chicken child choice choose church circle citizen city claim class clean clear
clever climate climb clock close clothes cloud coast collect college color column combine
comfort command common company compare compete complain complete computer concept concern
concert condition conduct confirm connect consider contain content context continue contract
control convert cookie copper corner correct cotton council country couple courage course cousin
cover create credit crime crisis critic crowd culture curious current curtain custom customer
damage dance danger daughter debate decade decide declare deep defend define degree deliver
demand depend depth describe desert design desire detail develop device dialogue diamond
different difficult digital dinner direct discover discuss disease distance divide doctor
document dollar domain double doubt dragon drama dream dress drink drive during dust eager early
earth easily east economy edge editor educate effect effort eight either electric element eleven
emotion empire employ empty energy enjoy enough enter entire equal escape especially essay
estate evening event evidence exact example excellent except exchange exercise exist expand
expect expensive expert explore express extend extra fabric factor factory fail fair faith
family famous farmer fashion father favorite feature feeling festival fiction field fifteen
fight figure final finger finish fire flight floor flower follow foot force foreign forest
forget forgive form formal fortune forward found frame freedom fresh friend front fruit function
funny furniture galaxy garden gather general gentle ghost giant gift girl glass global golden
govern grade grain grand grass gravity great green ground group grow guard guess guest guide
guitar habit half hammer handle happen happy harbor hardly harvest health hear heavy height
hello helpful hidden history holiday honest honey hope horse hospital hotel hour house however
humor hundred hungry hunter husband idea identify ignore image imagine impact import improve
include income increase indeed industry infant inform inside inspire install instead intend
interest invent invest invite iron island issue item jacket join journal journey judge juice
jungle junior justice keep kettle kitchen kingdom knife know ladder lamp language large later
laugh launch lawyer leader leaf league learn leather leave lecture left legal legend lemon
length lesson letter level library license light limit linear liquid listen literature little
location logic lonely lovely lower lucky lunch machine magic magnet main maintain major manage
manner market marry master match material matter maybe meadow measure medicine medium meeting
member mention message metal method middle midnight million mineral minor minute mirror mission
mistake mixture modern moment money monkey month moral mother motion motor mountain mouse mouth
movement movie muscle museum musical mystery narrow nation nature nearly necessary neighbor
neither nephew nervous network neutral news noble noise normal north notebook nothing notice
novel number nurse object observe obtain obvious occasion ocean offer office often onion opera
opinion oppose option orange orchestra order organize original other outside oven owner oxygen
package paint palace panel paper parent park particle partner passage passenger past patient
pattern peace pencil pepper perfect perform perhaps period permit person phone photograph phrase
physical piano picture piece pillow pilot pioneer planet plastic plate player pleasant plenty
pocket poem point polite politics popular position possible potato powder power practice prepare
present pressure pretty prevent price prince print prison private prize problem process produce
profit program project promise proof proper protect proud prove provide public purple purpose
quality quantity quarter queen question quick quiet quite rabbit radio railway rain random rapid
rather reach reaction ready reality reason receive recent recipe record reduce reflect region
regular relate relax religion remain remember remote repair repeat replace reply report rescue
research resource respect respond restaurant result return reveal review reward rhythm ribbon
right ring river road rocket roof room rough round route royal rubber rule sailor salad salt
sample sand satellite Saturday save scale scene schedule school science score screen search
season second secret section secure seed select sense sentence separate series serious servant
service session settle seven several shadow shape share sharp sheet shelf shelter shine ship
shirt shoe shop shore short should shoulder silence silver similar simple since singer single
sister situation skill sleep slight slow smart smile smooth snow social society soft soldier
solid solution solve someone something sometimes somewhere song soon source south space speak
special speech speed spirit split sport spread spring square stable stage stair stand star start
state station statue steady steel step stick still stone storm story straight strange stream
street strength stress strike strong structure student studio study style subject success such
sudden sugar suggest summer sunny supply support suppose sure surface surprise survive sweet
swim switch symbol system table talent target task taste teacher team technology telephone
temple tennis theater theory thick thing think third thirteen thousand thread through thunder
ticket tiger tired title today together tomorrow tongue tonight tool topic total touch tourist
toward tower trade tradition traffic train travel treasure treat tree tribe trick trouble truck
true trust truth twelve twenty twice type typical uncle under understand union unique unit
universe until upper useful usual valley value vanilla variety various vegetable vehicle version
victory video village violin visible visit vital voice volume voyage waiter walk wall warm wash
watch water wealth weapon wedding week weight welcome west whatever wheel where whether which
while whisper white whole wild window wine winter wisdom within without woman wonder wooden
worker world worry worth writer yellow yesterday young zebra
"""


def training_texts() -> list[str]:
    """The prose, and the word list in lower case and capitalised."""
    return [PROSE, WORDS, WORDS.title()]
