// Sphinx finds the pages with all words of a search, and gives each the score of its best word. Here the pages with the
// most words are found, so that an unknown word does no harm, and each gets the mean score of all words. As in Sphinx, a
// page need not have words of one or two letters.
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
    const most = Math.max(...[...pages.values()].map(([, count]) => count));
    return [...pages.values()]
      .filter(([, count]) => count === most)
      .map(([result, , sum]) => result.with(4, sum / words.size));
  };
});
