//! Pages: one self-contained file each, for any browser, without a network.
//!
//! Charts are SVG made here, so that a page shows (and prints) without scripts. A short script
//! shows the value under the pointer, draws heat maps and switches between light and dark. The
//! page's policy forbids loading anything.
//!
//! - [`chart`]: lines, bars, points and heat maps with axes.
//! - [`run`]: the page of one run; [`sweep`]: the page of a sweep; [`plan`]: the page of a plan.

pub mod chart;
mod over_time;
pub mod plan;
pub mod run;
pub mod sweep;

use std::fmt::Write as _;

/// Text escaped for HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A value as JSON for a `<script>`: nothing in it can end the element.
fn json(value: &serde_json::Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// A page under construction.
#[derive(Debug)]
pub struct Page {
    body: String,
    title: String,
}

impl Page {
    /// An empty page; `subtitle` is printed under its title.
    pub fn new(title: &str, subtitle: &str) -> Page {
        let mut page = Page {
            body: String::new(),
            title: title.to_owned(),
        };
        page.raw(&format!(
            "<header><div><h1>{}</h1><p>{}</p></div>\
             <button id=\"theme\" type=\"button\" hidden>light / dark</button></header>",
            escape(title),
            escape(subtitle)
        ));
        page
    }

    /// Adds HTML as it is.
    pub fn raw(&mut self, html: &str) {
        self.body.push_str(html);
        self.body.push('\n');
    }

    /// A warning.
    pub fn warning(&mut self, text: &str) {
        self.raw(&format!("<p class=\"warning\">{}</p>", escape(text)));
    }

    /// A heading, with a sentence under it unless `says` is empty.
    pub fn section(&mut self, title: &str, says: &str) {
        self.raw(&format!("<h2>{}</h2>", escape(title)));
        if !says.is_empty() {
            self.raw(&format!("<p class=\"says\">{}</p>", escape(says)));
        }
    }

    /// The page's answer in sentences, unless empty.
    pub fn lead(&mut self, text: &str) {
        if !text.is_empty() {
            self.raw(&format!("<p class=\"lead\">{}</p>", escape(text)));
        }
    }

    /// Figures next to each other: name, value, detail.
    pub fn tiles(&mut self, tiles: &[Tile]) {
        let mut html = String::from("<div class=\"tiles\">");
        for tile in tiles {
            write!(
                html,
                "<div><span>{}</span><b>{}</b><small>{}</small></div>",
                escape(&tile.name),
                escape(&tile.value),
                escape(&tile.beside)
            )
            .expect("a String takes every write");
        }
        html.push_str("</div>");
        self.raw(&html);
    }

    /// Charts in as many columns as the window allows.
    pub fn charts(&mut self, charts: impl IntoIterator<Item = String>) {
        self.raw("<div class=\"charts\">");
        for chart in charts {
            self.raw(&chart);
        }
        self.raw("</div>");
    }

    /// A table whose first `texts` columns are text and the others numbers. A row may be marked.
    pub fn table(&mut self, header: &[&str], texts: usize, rows: &[(Vec<String>, bool)]) {
        // Wide tables scroll, also by the keyboard.
        let mut html = String::from(
            "<div class=\"wide\" tabindex=\"0\" role=\"group\" aria-label=\"Table\"><table><thead><tr>",
        );
        for (at, name) in header.iter().enumerate() {
            // A column of names needs no header.
            let tag = if name.is_empty() { "td" } else { "th" };
            let class = if at < texts { " class=\"text\"" } else { "" };
            write!(html, "<{tag}{class}>{}</{tag}>", escape(name))
                .expect("a String takes every write");
        }
        html.push_str("</tr></thead><tbody>");
        for (cells, marked) in rows {
            html.push_str(if *marked {
                "<tr class=\"marked\">"
            } else {
                "<tr>"
            });
            for (at, cell) in cells.iter().enumerate() {
                let class = if at < texts { " class=\"text\"" } else { "" };
                // On a phone each row is a card, whose lines need their names.
                let name = header.get(at).filter(|name| !name.is_empty());
                let name = name.map_or_else(String::new, |name| {
                    format!(" data-name=\"{}\"", escape(name))
                });
                write!(html, "<td{class}{name}>{}</td>", escape(cell))
                    .expect("a String takes every write");
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></div>");
        self.raw(&html);
    }

    /// A text that is shown on demand.
    pub fn details(&mut self, name: &str, text: &str) {
        self.raw(&format!(
            "<details><summary>{}</summary><pre>{}</pre></details>",
            escape(name),
            escape(text)
        ));
    }

    /// The file's text.
    pub fn finish(self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"generator\" content=\"slipstream {}\">\n\
             <title>{}</title>\n<style>\n{}</style></head>\n<body>\n<main>{}</main>\
             <script>\n{}</script></body></html>\n",
            env!("CARGO_PKG_VERSION"),
            escape(&self.title),
            include_str!("page.css"),
            self.body,
            include_str!("page.js"),
        )
    }
}

/// One of [`Page::tiles`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tile {
    /// Name of the figure.
    pub name: String,
    /// The figure with its unit.
    pub value: String,
    /// A detail.
    pub beside: String,
}

impl Tile {
    /// A tile.
    pub fn new(name: &str, value: String, beside: String) -> Tile {
        Tile {
            name: name.to_owned(),
            value,
            beside,
        }
    }
}
