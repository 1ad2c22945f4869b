// Opens pages in Chromium, wide and narrow, light and dark, and checks each with axe-core; prints what is wrong.
//   npm install --prefix DIR playwright-core axe-core
//   NODE_MODULES=DIR/node_modules CHROMIUM=/usr/bin/chromium node check.mjs PAGE.html [SCREENSHOT_FOLDER]
// Exit code 1 if there is a violation, or if the page is wider than the window (tables scroll inside of their own box).
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(path.resolve(process.env.NODE_MODULES), "x.js"));
const { chromium } = require("playwright-core");
const [page, folder] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
});
let problems = 0;
for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280, 390]) {
    const context = await browser.newContext({ colorScheme, viewport: { width, height: 900 }, offline: true, bypassCSP: true });
    const tab = await context.newPage();
    const name = `${width} ${colorScheme}`;
    tab.on("request", (r) => {
      if (!r.url().startsWith("file:") && !r.url().startsWith("data:")) {
        problems += 1;
        console.log(`${name}: asks for ${r.url()}`);
      }
    });
    await tab.goto("file://" + path.resolve(page));
    for (const closed of await tab.$$("details:not([open])")) await closed.evaluate((x) => (x.open = true));
    await tab.addScriptTag({ path: require.resolve("axe-core/axe.min.js") });
    const { violations, passes } = await tab.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
    for (const v of violations) {
      problems += 1;
      console.log(`${name}: ${v.id} (${v.impact}): ${v.help}`);
      for (const node of v.nodes.slice(0, 3)) console.log(`    ${node.html.slice(0, 200)}\n    ${node.failureSummary.replaceAll("\n", " ")}`);
    }
    const excess = await tab.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    if (excess > 0) {
      problems += 1;
      console.log(`${name}: the page is ${excess} pixels wider than the window`);
    }
    console.log(`${name}: ${violations.length} violations, ${passes.length} rules passed`);
    if (folder) await tab.screenshot({ path: path.join(folder, `${width}-${colorScheme}.png`), fullPage: true });
    await context.close();
  }
}
await browser.close();
process.exit(problems ? 1 : 0);
