for (const part of document.querySelectorAll("[data-view]"))
  for (const [event, on] of [["mouseenter", true], ["mouseleave", false]])
    part.addEventListener(event, () => document.querySelectorAll(`[data-view="${part.dataset.view}"]`)
      .forEach(twin => twin.classList.toggle("on", on)));
