// Before anything is painted: the theme that was chosen here last. Without a choice the system decides.
try {
  const theme = localStorage.getItem("tandem.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is switched off */ }
