//! The width of a report, and how tables and lines fit it.
//!
//! A report is as wide as the terminal that shows it, or [`COLUMNS`] if standard output is no terminal; with `--wide`
//! it is as wide as its tables. A table that is too wide omits the columns that its caller can spare, and names them.
//! A table that is still too wide is split into parts below each other, each with the key columns. Nothing is cut off.

use std::io::{IsTerminal, stdout};

use comfy_table::{CellAlignment, ColumnConstraint, LineStyle, Table, Width, presets};

use super::output;

/// The width if standard output is no terminal.
pub const COLUMNS: usize = 80;

/// Spaces between two columns.
pub const GAP: usize = 2;

/// The least width to which a column of text is wrapped.
pub const TEXT: usize = 24;

/// The option of every command that prints tables.
#[derive(clap::Args)]
pub struct LookArguments {
    /// Prints tables with all their columns, however wide. Without it tables fit the terminal, or 80 columns if the
    /// output goes elsewhere.
    #[arg(long)]
    wide: bool,
}

impl LookArguments {
    /// The look of a report on standard output.
    pub fn look(&self) -> Look {
        Look { utf8: output::speaks_utf8(), width: (!self.wide).then(width) }
    }
}

/// Columns of the terminal on standard output.
pub fn width() -> usize {
    let terminal = stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    // A terminal that reports a width of 0 does not know its own.
    terminal.map(|(width, _)| usize::from(width.0)).filter(|width| *width > 0).unwrap_or(COLUMNS)
}

/// What a table that is too wide may omit.
#[derive(Clone, Copy, Default)]
pub struct Spare<'a> {
    /// Columns that are omitted one after another until the table fits, by the beginning of their headings.
    pub columns: &'a [&'a str],
    /// How many columns at the left identify a line: every part has them.
    pub keys: usize,
    /// The column whose text may be wrapped, by the beginning of its heading.
    pub text: Option<&'a str>,
}

/// The look of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Whether lines and bars may be drawn with more than ASCII.
    pub utf8: bool,
    /// The most characters of a line; none for no limit.
    pub width: Option<usize>,
}

impl Look {
    /// An empty table in the common style.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        let rule = if self.utf8 { '─' } else { '-' };
        table.load_style(presets::NOTHING.header_separator(LineStyle::none().fill(rule)));
        table
    }

    /// The table's lines, none of them wider than the report, without a final line end.
    pub fn fit(&self, mut table: Table, spare: &Spare<'_>) -> String {
        let widths: Vec<usize> = table.column_max_content_widths().into_iter().map(usize::from).collect();
        let heads = headings(&table, widths.len());
        let all: Vec<usize> = (0..widths.len()).collect();
        let Some(width) = self.width else { return part(&mut table, &all, None) };
        let begins =
            |column: usize, start: &str| heads.get(column).is_some_and(|head| head.starts_with(start));
        let text = spare.text.and_then(|start| all.iter().copied().find(|column| begins(*column, start)));
        let least = |column: &usize| {
            let own = widths.get(*column).copied().unwrap_or(0);
            if Some(*column) == text { own.min(TEXT) } else { own }
        };
        let total = |columns: &[usize]| columns.iter().map(|column| least(column) + GAP).sum::<usize>();
        let fits = |columns: &[usize]| total(columns) <= width + GAP;
        let (mut shown, mut left_out) = (all, Vec::new());
        for start in spare.columns {
            if fits(&shown) {
                break;
            }
            let (out, rest): (Vec<_>, Vec<_>) = shown.iter().partition(|column| begins(**column, start));
            left_out.extend(out.into_iter().filter_map(|column| heads.get(column)).cloned());
            shown = rest;
        }
        let keys = spare.keys.min(shown.len());
        let mut parts: Vec<Vec<usize>> = vec![shown.iter().take(keys).copied().collect()];
        for column in shown.into_iter().skip(keys) {
            let grown = parts.last().map(|last| [&last[..], &[column]].concat()).unwrap_or_default();
            match parts.last_mut() {
                Some(last) if fits(&grown) || last.len() <= keys => *last = grown,
                _ => {
                    let again = parts.first().map(|first| first.iter().take(keys).copied().collect());
                    parts.push([again.unwrap_or_default(), vec![column]].concat());
                }
            }
        }
        let room = |columns: &[usize]| {
            let column = text.filter(|column| columns.contains(column))?;
            let others = total(columns).saturating_sub(least(&column) + GAP);
            Some((column, width.saturating_sub(others).max(TEXT)))
        };
        let parts: Vec<String> =
            parts.iter().map(|columns| part(&mut table, columns, room(columns))).collect();
        let mut out = parts.join("\n\n");
        if !left_out.is_empty() {
            let named: Vec<String> = left_out.iter().map(|head| format!("\"{head}\"")).collect();
            let line = format!("Not shown, to fit {width} columns: {}. --wide shows all.", named.join(", "));
            out += &format!("\n{}", self.wrap(&line));
        }
        out
    }

    /// The text with long lines wrapped between words. Continuation lines keep the line's indentation.
    pub fn wrap(&self, text: &str) -> String {
        let Some(width) = self.width else { return text.to_owned() };
        let broken = text.split('\n').map(|line| {
            let indent = line.len() - line.trim_start_matches(' ').len();
            match line.chars().count() <= width {
                true => line.to_owned(),
                false => lines(line, width, indent).join("\n"),
            }
        });
        broken.collect::<Vec<_>>().join("\n")
    }
}

/// The words of a text in lines of at most `width` characters, each indented; a longer word gets a line of its own.
pub fn lines(text: &str, width: usize, indent: usize) -> Vec<String> {
    let (mut lines, indent): (Vec<String>, _) = (Vec::new(), " ".repeat(indent));
    let mut length = 0;
    for word in text.split_whitespace() {
        let more = word.chars().count();
        match lines.last_mut() {
            Some(line) if length + 1 + more <= width => {
                line.push(' ');
                line.push_str(word);
                length += 1 + more;
            }
            _ => {
                lines.push(format!("{indent}{word}"));
                length = indent.len() + more;
            }
        }
    }
    lines
}

/// The headings, each on one line.
fn headings(table: &Table, columns: usize) -> Vec<String> {
    let cells =
        table.header().map(|row| row.cell_iter().map(|cell| cell.content().replace('\n', " ")).collect());
    let mut heads: Vec<String> = cells.unwrap_or_default();
    heads.resize(columns, String::new());
    heads
}

/// The table with only these columns, and the text of one wrapped to a width.
fn part(table: &mut Table, columns: &[usize], text: Option<(usize, usize)>) -> String {
    let last = columns.last().copied();
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if Some(index) == last { 0 } else { GAP as u16 }));
        column.remove_constraint();
        if !columns.contains(&index) {
            column.set_constraint(ColumnConstraint::Hidden);
        } else if let Some((_, width)) = text.filter(|(of, _)| *of == index) {
            let width = u16::try_from(width).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::UpperBoundary(Width::Fixed(width)));
        }
    }
    table.trim_fmt()
}

/// Aligns numbers to the right; names and bars stay at the left.
pub fn align_right(table: &mut Table, is_number: impl Fn(usize) -> bool) {
    for (i, column) in table.column_iter_mut().enumerate() {
        if is_number(i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Characters of the longest bar.
pub const BAR: usize = 16;

/// A bar's last character, by eighths.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// `value` as a bar in proportion to the longest one.
pub fn bar(value: f64, longest: f64, characters: usize, utf8: bool) -> String {
    if longest <= 0.0 {
        return String::new();
    }
    let length = value / longest * characters as f64;
    if !utf8 {
        return "#".repeat(length.round() as usize);
    }
    let eighths = (length * 8.0).round() as usize;
    "█".repeat(eighths / 8) + EIGHTHS.get(eighths % 8).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(look: Look) -> Table {
        let mut table = look.table();
        table.set_header(["name", "first\nof all", "second", "third"]);
        table.add_row(["a name", "1234567890", "1234567890", "1234567890"]);
        table.add_row(["b", "1", "2", "3"]);
        align_right(&mut table, |column| column > 0);
        table
    }

    fn at(width: usize) -> Look {
        Look { utf8: false, width: Some(width) }
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap()
    }

    #[test]
    fn a_table_that_fits_is_left_alone() {
        let all = Look { utf8: false, width: None };
        let whole = all.fit(sample(all), &Spare { columns: &["first"], ..Spare::default() });
        assert_eq!(widest(&whole), 6 + 3 * 12, "{whole}");
        assert_eq!(at(42).fit(sample(at(42)), &Spare { columns: &["first"], ..Spare::default() }), whole);
    }

    #[test]
    fn optional_columns_are_left_out_in_order_and_named() {
        let spare = Spare { columns: &["second", "nothing", "first", "third"], keys: 1, text: None };
        let less = at(41).fit(sample(at(41)), &spare);
        assert!(!less.lines().next().unwrap().contains("second") && less.contains("first"), "{less}");
        assert!(less.ends_with("\nNot shown, to fit 41 columns: \"second\".\n--wide shows all."), "{less}");
        let least = at(25).fit(sample(at(25)), &spare);
        assert!(widest(&least) <= 25 && least.contains("third"), "{least}");
        assert!(
            least.replace('\n', " ").contains("25 columns: \"second\", \"first of all\". --wide"),
            "{least}"
        );
    }

    #[test]
    fn a_table_without_optional_columns_is_split_into_parts() {
        let parts = at(30).fit(sample(at(30)), &Spare { keys: 1, ..Spare::default() });
        assert!(widest(&parts) <= 30 && parts.matches("a name").count() == 2, "{parts}");
        assert!(parts.contains("first") && parts.contains("second") && parts.contains("third"), "{parts}");
        assert!(!parts.contains("--wide"), "{parts}");
        // A column wider than the page has a part of its own.
        let narrow = at(5).fit(sample(at(5)), &Spare { keys: 1, ..Spare::default() });
        assert_eq!(narrow.matches("a name").count(), 3, "{narrow}");
    }

    #[test]
    fn a_column_of_text_is_broken_between_words() {
        let mut table = at(50).table();
        table.set_header(["name", "what it means"]);
        table.add_row(["name", &"word ".repeat(30)]);
        let spare = Spare { text: Some("what"), keys: 1, columns: &[] };
        let text = at(50).fit(table, &spare);
        assert!(widest(&text) <= 50 && text.matches("word").count() == 30, "{text}");
        assert_eq!(text.lines().count(), 2 + 4, "{text}");
    }

    #[test]
    fn long_lines_are_broken_between_words_and_stay_indented() {
        let text = "  one two three\nshort\n\na_very_long_path of it";
        assert_eq!(at(9).wrap(text), "  one two\n  three\nshort\n\na_very_long_path\nof it");
        assert_eq!(Look { utf8: true, width: None }.wrap(text), text);
    }

    #[test]
    fn bars_have_a_resolution_of_eighths_or_of_whole_characters() {
        assert_eq!(bar(1.0, 1.0, BAR, true), "█".repeat(BAR));
        assert_eq!(bar(1.0, BAR as f64 * 2.0, BAR, true), "▌");
        assert_eq!(bar(1.0, 2.0, BAR, false), "#".repeat(BAR / 2));
        assert_eq!(bar(0.0, 0.0, BAR, true), "");
    }
}
