// Where no page has all words of a search, the pages with most of them are found: Sphinx itself finds no page there.
document.addEventListener("DOMContentLoaded", () => {
  const search = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const found = search(words, excluded);
    if (found.length || words.size < 2) return found;
    const pages = new Map(); // by name: the number of words, and the result with the best score
    for (const word of words)
      for (const result of search(new Set([word]), excluded)) {
        const [count, best] = pages.get(result[0]) ?? [0, result];
        pages.set(result[0], [count + 1, result[4] > best[4] ? result : best]);
      }
    const most = Math.max(...[...pages.values()].map(([count]) => count));
    return [...pages.values()].filter(([count]) => count === most).map(([, result]) => result);
  };
});
