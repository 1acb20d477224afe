// Sphinx finds the pages with all words of a search, and gives each the score of its best word. Here a page needs half
// of the words that the best page has, so that a rare or unknown word does no harm, and gets the mean score of all
// words. As in Sphinx, words of one or two letters are not needed. A word in the title of a page, and each further word
// in the same heading, adds less than a word in the text. Of equal pages, the first is the one with the largest share
// of the words in its title.
const IN_TITLE = 4;
const IN_SAME_HEADING = 4;
document.addEventListener("DOMContentLoaded", () => {
  const search = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const isLong = (word) => word.length > 2;
    const counted = [...words].some(isLong) ? isLong : () => true;
    const pages = new Map(); // the result, the number of counted words, and the sum of the scores, by page
    for (const word of words)
      for (const result of search(new Set([word]), excluded)) {
        const [, count, sum] = pages.get(result[0]) ?? [result, 0, 0];
        pages.set(result[0], [result, count + counted(word), sum + result[4]]);
      }
    const stemmer = new Stemmer();
    const stems = (heading) => splitQuery(heading.toLowerCase()).map((word) => stemmer.stemWord(word));
    const numIn = (heading) => new Set(stems(heading).filter((stem) => words.has(stem))).size;
    const further = new Map(); // the words in the heading with the most words, without the first, by page
    for (const [heading, places] of Object.entries(Search._index.alltitles))
      for (const [number] of places) {
        const page = Search._index.docnames[number];
        further.set(page, Math.max(numIn(heading) - 1, further.get(page) ?? 0));
      }
    const most = Math.max(...[...pages.values()].map(([, count]) => count));
    return [...pages.values()]
      .filter(([, count]) => 2 * count >= most)
      .map(([result, , sum]) => {
        const [page, title] = result;
        const extra = IN_TITLE * numIn(title) + IN_SAME_HEADING * (further.get(page) ?? 0);
        return result.with(4, (sum + extra) / words.size + numIn(title) / stems(title).length);
      });
  };
});
