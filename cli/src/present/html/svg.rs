//! Elements of an inline picture, and the only way for text from files to enter the page.
//!
//! Every text passes [`escape`]: names and labels come from trace files, which anyone may have written. Colours are
//! classes, never values, so that the page's style sheet sets them for light and dark mode.

use std::fmt::{Display, Write};

use forebay::text::steers;

/// Text as HTML shows it: without markup, and without characters that end an attribute or a line, or change the
/// direction of writing.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if steers(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A coordinate with at most one decimal; 0 if it is not a number.
pub fn at(value: f64) -> String {
    let value = if value.is_finite() { (value * 10.0).round() / 10.0 } else { 0.0 };
    // -0 would keep its sign.
    format!("{}", value + 0.0)
}

/// The side of its point on which a text is placed.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// To the right of it.
    Start,
    /// Around it.
    Middle,
    /// To the left of it.
    End,
}

impl Anchor {
    fn class(self) -> &'static str {
        match self {
            Anchor::Start => "",
            Anchor::Middle => " m",
            Anchor::End => " e",
        }
    }
}

/// A position in a picture: x from its left, y from its top.
pub type Point = (f64, f64);

/// A picture under construction.
pub struct Svg {
    out: String,
}

impl Svg {
    /// A picture of `width` by `height` units, which scales to the available room. `title` and `description` are
    /// for screen readers.
    pub fn new(width: f64, height: f64, title: &str, description: &str) -> Svg {
        let out = format!(
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\"><desc>{}</desc>",
            at(width),
            at(height),
            escape(title),
            escape(description),
        );
        Svg { out }
    }

    fn put(&mut self, element: impl Display) {
        // Writing to a string cannot fail.
        let _ = write!(self.out, "{element}");
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, from: Point, to: Point) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.put(format_args!(
            "<path class=\"{class}\" d=\"M{} {}L{} {}\"/>",
            at(x1),
            at(y1),
            at(x2),
            at(y2)
        ));
    }

    /// A line through all points.
    pub fn polyline(&mut self, class: &str, points: &[Point], hint: &str) {
        self.path(class, &through(points), hint);
    }

    /// Any path; `hint` is shown under a pointer.
    pub fn path(&mut self, class: &str, d: &str, hint: &str) {
        if d.is_empty() {
            return;
        }
        self.put(format_args!("<path class=\"{class}\" d=\"{d}\""));
        self.close("path", hint);
    }

    /// A rectangle from its upper left corner; nothing if it has no extent.
    pub fn rect(&mut self, class: &str, corner: Point, width: f64, height: f64, hint: &str) {
        if !(width > 0.0 && height > 0.0) {
            return;
        }
        let (x, y) = corner;
        self.put(format_args!(
            "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"",
            at(x),
            at(y),
            at(width),
            at(height)
        ));
        self.close("rect", hint);
    }

    /// A dot.
    pub fn dot(&mut self, class: &str, middle: Point, radius: f64, hint: &str) {
        let (x, y) = middle;
        self.put(format_args!(
            "<circle class=\"{class}\" cx=\"{}\" cy=\"{}\" r=\"{}\"",
            at(x),
            at(y),
            at(radius)
        ));
        self.close("circle", hint);
    }

    fn close(&mut self, element: &str, hint: &str) {
        match hint {
            "" => self.put("/>"),
            hint => self.put(format_args!("><title>{}</title></{element}>", escape(hint))),
        }
    }

    /// A line of text; nothing if it is empty.
    pub fn text(&mut self, class: &str, anchor: Anchor, point: Point, text: &str) {
        if text.is_empty() {
            return;
        }
        let classes = format!("{class}{}", anchor.class());
        let (x, y, text) = (at(point.0), at(point.1), escape(text));
        match classes.trim() {
            "" => self.put(format_args!("<text x=\"{x}\" y=\"{y}\">{text}</text>")),
            classes => self.put(format_args!("<text class=\"{classes}\" x=\"{x}\" y=\"{y}\">{text}</text>")),
        }
    }

    /// The picture's markup.
    pub fn finish(mut self) -> String {
        self.out.push_str("</svg>");
        self.out
    }
}

/// The path through all points; nothing for fewer than two.
pub fn through(points: &[Point]) -> String {
    let mut d = String::new();
    if points.len() < 2 {
        return d;
    }
    for (i, (x, y)) in points.iter().enumerate() {
        let sign = match i {
            0 => "M",
            1 => "L",
            _ => " ",
        };
        let _ = write!(d, "{sign}{} {}", at(*x), at(*y));
    }
    d
}

/// A picture as a separate file, with its description and style.
pub fn document(svg: &str, style: &str) -> String {
    let own = ".head { font-size: 19px; font-weight: 650; } .track { fill: var(--grid); }\n\
               svg { background: var(--paper); font-family: system-ui, sans-serif; }\n";
    // The opening tag contains no other `>`: texts in it are escaped.
    match svg.split_once('>') {
        Some((opening, rest)) => format!(
            "{opening} xmlns=\"http://www.w3.org/2000/svg\"><style><![CDATA[\n{style}{own}]]></style>{rest}\n"
        ),
        None => svg.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_a_file_is_never_markup() {
        let text = escape("<img src=x onerror=\"a('b')\">&\u{1b}\u{202e}");
        assert_eq!(text, "&lt;img src=x onerror=&quot;a(&#39;b&#39;)&quot;&gt;&amp;\u{fffd}\u{fffd}");
    }

    #[test]
    fn coordinates_are_short_finite_numbers() {
        assert_eq!([1.0, 1.25, -0.04, f64::NAN, f64::INFINITY].map(at), ["1", "1.3", "0", "0", "0"]);
    }

    #[test]
    fn shapes_without_extent_are_not_drawn() {
        let mut svg = Svg::new(1.0, 1.0, "", "");
        svg.rect("a", (0.0, 0.0), 0.0, 5.0, "");
        svg.polyline("a", &[(0.0, 0.0)], "");
        svg.text("a", Anchor::End, (0.0, 0.0), "");
        assert!(!svg.finish().contains("class"));
    }
}
