// A browser lets no page read another where both are files: there the excerpts of the search come from pages.js.
if (location.protocol === "file:") {
  const pages = new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "_static/pages.js";
    script.onload = () => done(PAGES);
    script.onerror = failed;
    document.head.append(script);
  });
  window.fetch = async (url) => new Response((await pages)[url.replace(/^\.\//, "").replace(/\.html$/, "")]);
}
