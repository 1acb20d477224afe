// A page that answers one question stands in the search before the long ones, which have nearly every word.
var Scorer = {
  score: ([docname, , , , score]) => score
    + (/^(how-to|tutorial|explanation)\//.test(docname) ? 6 : 0)
    - (/^(modules\/|reference\/(config|commands))/.test(docname) ? 6 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
