// What the theme leaves out for those who read by keyboard or screen reader: the bar is a landmark, and what scrolls can be focused.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".navbar")?.setAttribute("role", "navigation");
  for (const box of document.querySelectorAll("pre, [role=main] table")) box.tabIndex = 0;
});
