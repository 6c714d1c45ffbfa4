byId("theme-here").append(themeControl());
