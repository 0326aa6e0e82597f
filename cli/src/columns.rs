//! A table that leaves out columns where a line is too short for all of them.

use crate::report::{align_right, table};

/// From this rank on a column stands in tables of any width alone.
pub const WIDE: u8 = 9;

struct Column {
    head: &'static str,
    rank: u8,
    cells: Vec<String>,
}

/// Columns, the most necessary ones with rank 0.
#[derive(Default)]
pub struct Columns {
    all: Vec<Column>,
    marks: bool,
}

/// The longest line of a text.
fn width(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

impl Columns {
    /// Adds a column.
    pub fn push(&mut self, head: &'static str, rank: u8, cells: Vec<String>) {
        self.all.push(Column { head, rank, cells });
    }

    /// Adds the last column, without a name, which stands to the left; none where it is empty.
    pub fn push_marks(&mut self, cells: Vec<String>) {
        self.marks = cells.iter().any(|cell| !cell.is_empty());
        if self.marks {
            self.push("", 0, cells);
        }
    }

    /// The table in lines of at most `width` characters, where its columns of rank 0 leave them, and whether any was
    /// left out. Of those that stand too wide the one of the highest rank goes first.
    pub fn drawn(&self, utf8: bool, most: usize) -> (String, bool) {
        let all = |limit: u8| self.drawn_to(utf8, limit);
        if most == usize::MAX {
            return (all(u8::MAX), false);
        }
        let mut limit = WIDE - 1;
        let mut drawn = all(limit);
        while limit > 0 && width(&drawn) > most {
            limit -= 1;
            drawn = all(limit);
        }
        (drawn, self.all.iter().any(|column| column.rank > limit))
    }

    fn drawn_to(&self, utf8: bool, limit: u8) -> String {
        let shown: Vec<&Column> = self.all.iter().filter(|column| column.rank <= limit).collect();
        let mut table = table(utf8);
        table.set_header(shown.iter().map(|column| column.head));
        for line in 0..shown.iter().map(|column| column.cells.len()).max().unwrap_or(0) {
            table.add_row(shown.iter().map(|column| column.cells.get(line).map_or("", String::as_str)));
        }
        let numbers = shown.len() - usize::from(self.marks && !shown.is_empty());
        let names = shown.iter().take_while(|column| matches!(column.head, "model" | "link")).count();
        align_right(&mut table, |column| (names..numbers).contains(&column));
        table.trim_fmt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_least_necessary_goes_first() {
        let mut columns = Columns::default();
        let cells = |text: &str| vec![text.to_owned(); 2];
        columns.push("a", 0, cells("11111111"));
        columns.push("b", 2, cells("22222222"));
        columns.push("c", 1, cells("33333333"));
        columns.push("d", WIDE, cells("44444444"));
        columns.push_marks(cells(""));
        let shown = |most| {
            let (text, hidden) = columns.drawn(false, most);
            let found: String =
                ["1", "2", "3", "4"].into_iter().filter(|digit| text.contains(digit)).collect();
            assert!(most < 9 || width(&text) <= most, "{text}");
            (found, hidden)
        };
        assert_eq!(shown(usize::MAX), ("1234".to_owned(), false));
        assert_eq!(shown(80), ("123".to_owned(), true));
        assert_eq!(shown(25), ("13".to_owned(), true));
        assert_eq!(shown(12), ("1".to_owned(), true));
        assert_eq!(shown(3), ("1".to_owned(), true));
    }
}
