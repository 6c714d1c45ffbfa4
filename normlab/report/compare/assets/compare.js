for (const line of DATA.answer) byId("compare").append(make("p", {}, line));
