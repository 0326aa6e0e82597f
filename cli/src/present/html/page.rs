//! The page around the pictures: one self-contained HTML file that runs no script and makes no request.
//!
//! The content security policy in its head forbids both, whatever a trace's label contains. Texts passed to this
//! module are plain and are escaped here. Pictures are markup, made by [`super::svg`].

use std::fmt::Write;
use std::path::PathBuf;

use super::svg::escape;

pub const STYLE: &str = include_str!("style.css");

/// Forbids everything except the page's own style.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// A longer headline, in bytes, is a sentence and is set smaller.
const SENTENCE: usize = 60;

/// A figure at the top of a section.
pub struct Tile {
    /// The value, in large type.
    pub value: String,
    /// Its name.
    pub what: String,
    /// Its context.
    pub more: String,
}

/// Numbers in rows, the first column a name.
#[derive(Default)]
pub struct Table {
    /// Names of the columns.
    pub head: Vec<String>,
    /// Their cells.
    pub rows: Vec<Vec<String>>,
}

/// Pictures, and a sentence that says what they show.
pub struct Card {
    /// The title.
    pub name: String,
    /// The sentence.
    pub sentence: String,
    /// Markup, one picture each.
    pub pictures: Vec<String>,
    /// The numbers.
    pub table: Table,
    /// Whether it takes the whole width, with its pictures side by side.
    pub wide: bool,
}

/// The section of one trace.
pub struct Section {
    /// Its name.
    pub title: String,
    /// A warning above all figures, if needed.
    pub warning: Option<String>,
    /// Lines about the replay.
    pub facts: Vec<String>,
    /// The most important figures.
    pub tiles: Vec<Tile>,
    /// The pictures.
    pub cards: Vec<Card>,
}

/// Adds the path to titles that several sections share.
pub fn tell_apart(sections: &mut [Section], paths: &[PathBuf]) {
    let titles: Vec<String> = sections.iter().map(|section| section.title.clone()).collect();
    for (section, path) in sections.iter_mut().zip(paths) {
        let path = path.display().to_string();
        let repeats = titles.iter().filter(|title| **title == section.title).count() > 1;
        if repeats && path != section.title {
            section.title += &format!(" ({path})");
        }
    }
}

/// The top of a page.
pub struct Head<'a> {
    /// The command that wrote it.
    pub command: &'a str,
    /// The question that the page answers, or the answer in a sentence.
    pub question: &'a str,
    /// The word for its sections, if there are several.
    pub things: &'a str,
    /// What the page shows.
    pub intro: &'a str,
}

/// The page of a replay. `notes` are the definitions at its end.
pub fn document(sections: &[Section], intro: &str, notes: &[String]) -> String {
    let head = Head { command: "replay", question: "Policy or working set?", things: "traces", intro };
    page(&head, sections, notes)
}

/// The whole page. `notes` are the definitions at its end.
pub fn page(head: &Head<'_>, sections: &[Section], notes: &[String]) -> String {
    let command = head.command;
    let title = match sections {
        [one] => format!("{} · forebay {command}", one.title),
        many => format!("{} {} · forebay {command}", many.len(), head.things),
    };
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<p class=\"eyebrow\">forebay {command} {}</p>\n<h1{}>{}</h1>\n\
         <p class=\"intro\">{}</p>\n",
        escape(&title),
        env!("CARGO_PKG_VERSION"),
        if head.question.len() > SENTENCE { " class=\"sentence\"" } else { "" },
        escape(head.question),
        escape(head.intro),
    );
    if sections.len() > 1 {
        out += "<nav aria-label=\"Sections\"><ul>\n";
        for (i, section) in sections.iter().enumerate() {
            let _ = writeln!(out, "<li><a href=\"#trace-{}\">{}</a></li>", i + 1, escape(&section.title));
        }
        out += "</ul></nav>\n";
    }
    out += "</header>\n";
    for (i, section) in sections.iter().enumerate() {
        write_section(&mut out, section, i + 1);
    }
    out += "</main>\n<footer>\n";
    for note in notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
    out + "</footer>\n</body>\n</html>\n"
}

fn write_section(out: &mut String, section: &Section, number: usize) {
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "<section id=\"trace-{number}\">\n<h2>{}</h2>", escape(&section.title));
    if let Some(warning) = &section.warning {
        let _ = writeln!(out, "<p class=\"badge\">{}</p>", escape(warning));
    }
    *out += "<ul class=\"facts\">\n";
    for fact in &section.facts {
        let _ = writeln!(out, "<li>{}</li>", escape(fact));
    }
    *out += "</ul>\n";
    if !section.tiles.is_empty() {
        *out += "<div class=\"tiles\">\n";
        for Tile { value, what, more } in &section.tiles {
            let _ = writeln!(
                out,
                "<div class=\"tile\"><div class=\"value\">{}</div><div class=\"what\">{}</div>\
                 <div class=\"more\">{}</div></div>",
                escape(value),
                escape(what),
                escape(more)
            );
        }
        *out += "</div>\n";
    }
    *out += "<div class=\"cards\">\n";
    for card in &section.cards {
        write_card(out, card);
    }
    *out += "</div>\n</section>\n";
}

fn write_card(out: &mut String, card: &Card) {
    let _ = writeln!(
        out,
        "<figure{}>\n<h3>{}</h3>\n<figcaption>{}</figcaption>\n<div class=\"pictures\">\n{}\n</div>",
        if card.wide { " class=\"wide\"" } else { "" },
        escape(&card.name),
        escape(&card.sentence),
        card.pictures.join("\n")
    );
    if !card.table.rows.is_empty() {
        *out += "<details><summary>Figures</summary><div class=\"scroll\"><table>\n<tr>";
        for name in &card.table.head {
            let _ = write!(out, "<th scope=\"col\">{}</th>", escape(name));
        }
        *out += "</tr>\n";
        for row in &card.table.rows {
            *out += "<tr>";
            for cell in row {
                let _ = write!(out, "<td>{}</td>", escape(cell));
            }
            *out += "</tr>\n";
        }
        *out += "</table></div></details>\n";
    }
    *out += "</figure>\n";
}
