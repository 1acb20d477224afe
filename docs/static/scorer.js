const QUERY = (new URLSearchParams(window.location.search).get("q") ?? "").toLowerCase().trim();

// A page that answers one question stands in the search before the long ones, which have nearly every word, and before
// the list of the tasks. Of equal results, the first is the one whose title consists of the query for the largest part.
var Scorer = {
  score: ([docname, title, , , score]) => score
    + (title.toLowerCase().includes(QUERY) ? QUERY.length / title.length : 0)
    + (/^(how-to\/(?!README)|tutorial\/|explanation\/)/.test(docname) ? 6 : 0)
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
