"""The built-in vocabulary from which the generated model's tokenizer is trained and in which the model answers.

Order matters: a word's rank is its weight in the training text, so changing the list changes every generated file.
"""

from __future__ import annotations

__all__ = ["WORDS"]

_BY_RANK = """
the of and to in is that for it as with on be at this by from or are an was not have but which one all you can has
there more if will would about out up other new some time these two may then do first any my now such like our over
into than its who did what hello please thanks question answer because before after between through under while where
when how why each every both many most number part people world place work case point group problem fact hand day
night week month year morning evening hour minute system state power water fire stone wood iron glass paper river
ocean island mountain valley forest garden field road bridge house door window table chair lamp mirror clock bell book
letter page story song word voice name line circle square corner light shadow colour red green blue white black yellow
silver golden dark bright warm cold quiet loud soft hard long short wide deep high low near far left right north south
east west early late slow quick heavy empty full open closed young old good great small large little simple single
double common strange careful certain clear free ready real round sharp smooth steady strong bird horse fish cat dog
bear wolf fox deer bee spider snake tree leaf root flower seed grass moss rain snow wind storm cloud star moon sun sky
earth sand dust smoke wave tide harbour ship sail rope anchor engine wheel train station market street city village
tower wall roof floor kitchen bread butter apple lemon honey salt sugar coffee tea milk soup dinner supper plate cup
spoon knife bottle basket coat hat shoe ring thread needle cloth wool silk hammer nail ladder box key lock coin map
child mother father sister brother friend neighbour teacher doctor farmer baker sailor painter writer king queen judge
guard walk run stand sit turn move carry bring take give find lose keep hold build break mend write read speak listen
sing play sleep wake dream think know learn teach remember forget wait follow lead meet leave return begin end change
grow fall rise burn shine count measure compare describe explain travel visit gather share choose decide hope believe
wonder notice discover cache block token prefill decode memory network server client request model layer batch queue
signal buffer index table vector matrix prompt context window session turn history prefix suffix random pattern method
result value error limit budget
"""

WORDS: tuple[str, ...] = tuple(dict.fromkeys(_BY_RANK.split()))
