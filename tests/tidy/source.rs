//! Reads Rust text well enough for the rules: which characters are code and which are comments, which
//! lines only tests compile, and which paths a file names.
//!
//! This is a lexer, not a parser: it recognises comments, strings, characters and braces. It does not recognise paths
//! that macros build out of pieces; none of the rules needs them.

/// A text split by kind. Both fields have the lines and columns of the original, blanks elsewhere.
pub struct Split {
    /// Code alone: no comments, and strings without their contents.
    pub code: String,
    /// Comments alone, with their slashes.
    pub comments: String,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    Line,
    Block(u32),
    Text,
    Raw(usize),
}

/// Splits Rust (or, nearly enough, C) into code and comments.
pub fn split(text: &str) -> Split {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\n');
    let (mut code, mut comments) = (String::new(), String::new());
    let mut state = State::Code;
    let mut i = 0;
    while i < chars.len() {
        let (c, next) = (at(i), at(i + 1));
        let mut taken = 1;
        let mut shown = state;
        match state {
            State::Code => match (c, next) {
                ('/', '/') => (state, shown) = (State::Line, State::Line),
                ('/', '*') => (state, shown, taken) = (State::Block(1), State::Block(1), 2),
                ('"', _) => state = State::Text,
                ('r', '"' | '#') if i == 0 || !is_word(at(i - 1)) || at(i - 1) == 'b' => {
                    let hashes = (i + 1..).take_while(|j| at(*j) == '#').count();
                    if at(i + 1 + hashes) == '"' {
                        (state, taken) = (State::Raw(hashes), hashes + 2);
                    }
                }
                ('\'', '\\') => {
                    let long = (i + 3..chars.len()).take_while(|j| at(*j) != '\'').count();
                    (shown, taken) = (State::Text, long + 4);
                }
                ('\'', _) if at(i + 2) == '\'' => (shown, taken) = (State::Text, 3),
                _ => {}
            },
            State::Line if c == '\n' => state = State::Code,
            State::Line => {}
            State::Block(depth) => match (c, next) {
                ('*', '/') if depth == 1 => (state, taken) = (State::Code, 2),
                ('*', '/') => (state, taken) = (State::Block(depth - 1), 2),
                ('/', '*') => (state, taken) = (State::Block(depth + 1), 2),
                _ => {}
            },
            State::Text => match c {
                '\\' => taken = 2,
                '"' => (state, shown) = (State::Code, State::Code),
                _ => {}
            },
            State::Raw(hashes) => {
                if c == '"' && (1..=hashes).all(|j| at(i + j) == '#') {
                    (state, taken) = (State::Code, hashes + 1);
                }
            }
        }
        for c in (i..i + taken).map_while(|j| chars.get(j)) {
            let (in_code, in_comment) = match shown {
                State::Code => (*c, ' '),
                State::Line | State::Block(_) => (' ', *c),
                State::Text | State::Raw(_) => (' ', ' '),
            };
            code.push(if *c == '\n' { '\n' } else { in_code });
            comments.push(if *c == '\n' { '\n' } else { in_comment });
        }
        i += taken;
    }
    Split { code, comments }
}

/// Whether `c` can be part of an identifier.
pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `word` is in `line` with no identifier character on either side.
pub fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(i, _)| {
        let before = line[..i].chars().next_back();
        let after = line[i + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// A token of code with its line (from 1): an identifier, `::`, or one character.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token's text.
    pub text: String,
    /// Its line, from 1.
    pub line: usize,
}

/// The tokens of code without comments.
pub fn tokens(code: &str) -> Vec<Token> {
    let mut all: Vec<Token> = Vec::new();
    for (n, text) in code.lines().enumerate() {
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let end = if is_word(first) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            all.push(Token { text: rest[..end].to_owned(), line: n + 1 });
            rest = rest[end..].trim_start();
        }
    }
    all
}

/// For each line (from 0), whether only tests compile it: inside an item under a `cfg` that names `test`.
pub fn test_lines(code: &str) -> Vec<bool> {
    let tokens = tokens(code);
    let mut marks = vec![false; code.lines().count()];
    let texts: Vec<&str> = tokens.iter().map(|t| t.text.as_str()).collect();
    for i in 0..texts.len() {
        if !texts[i..].starts_with(&["#", "[", "cfg", "("]) {
            continue;
        }
        let Some(close) = texts[i..].iter().position(|t| *t == "]").map(|n| n + i) else {
            continue;
        };
        let cfg = &texts[i..close];
        if !cfg.contains(&"test") || cfg.contains(&"not") || cfg.contains(&"any") {
            continue;
        }
        let mut depth = 0_u32;
        let end = texts[close + 1..].iter().position(|t| {
            match *t {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth = depth.saturating_sub(1),
                _ => {}
            }
            (*t == "}" || *t == ";") && depth == 0
        });
        let last = end.map_or(marks.len(), |n| tokens[close + 1 + n].line);
        for mark in &mut marks[tokens[i].line - 1..last] {
            *mark = true;
        }
    }
    marks
}

/// A path as written, made absolute: `super::a` in `src/os/map.rs` is `crate::os::a`.
#[derive(Debug, PartialEq)]
pub struct Path {
    /// Its names, from `crate`, `std` or another crate on.
    pub names: Vec<String>,
    /// Its line, from 1.
    pub line: usize,
    /// The name that a `use` gives it: its last name, or the one after `as`.
    pub bound: String,
}

/// The module of a token: the file's, or an inline module of it.
struct Inside {
    modules: Vec<String>,
    depth: usize,
    inner: Vec<usize>,
}

impl Inside {
    fn of(modules: Vec<String>) -> Inside {
        Inside { modules, depth: 0, inner: Vec::new() }
    }

    /// Steps over the token at `i`.
    fn step(&mut self, tokens: &[Token], i: usize) {
        match tokens[i].text.as_str() {
            "{" => {
                self.depth += 1;
                if i >= 2 && tokens[i - 2].text == "mod" {
                    self.modules.push(tokens[i - 1].text.clone());
                    self.inner.push(self.depth);
                }
            }
            "}" => {
                if self.inner.last() == Some(&self.depth) {
                    self.inner.pop();
                    self.modules.pop();
                }
                self.depth = self.depth.saturating_sub(1);
            }
            _ => {}
        }
    }
}

/// Every path of a file under `src/` that starts with `crate`, `self`, `super`, `std`, `core`, `loom` or
/// `parking_lot`, with groups `{a, b}` taken apart.
pub fn paths(file: &str, code: &str) -> Vec<Path> {
    let tokens = tokens(code);
    let mut found = Vec::new();
    let mut inside = Inside::of(module_of(file));
    let text = |i: usize| tokens.get(i).map_or("", |t| t.text.as_str());
    for i in 0..tokens.len() {
        inside.step(&tokens, i);
        let root = ["crate", "self", "super", "std", "core", "loom", "parking_lot"].contains(&text(i));
        if root && text(i + 1) == "::" && (i == 0 || text(i - 1) != "::") {
            follow(&tokens, i, &inside.modules, Vec::new(), &mut found);
        }
    }
    found
}

/// The place of a name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Site {
    /// In a `use`.
    Use,
    /// In a `pub use`, of any visibility.
    Passed,
    /// Anywhere else.
    Code,
}

/// A name as written; absolute if it begins with `crate`, `self` or `super`.
#[derive(Debug)]
pub struct Name {
    /// Its parts.
    pub path: Vec<String>,
    /// The name that a `use` gives it.
    pub bound: String,
    /// Its line, from 1.
    pub line: usize,
    /// Its place.
    pub site: Site,
    /// Whether it is in an inline module.
    pub inside: bool,
}

/// Every name in the code of the file of `module`: the names of each `use`, with groups taken apart, and in other code
/// every path, and every word that looks like the name of a function or a type.
pub fn names(module: &[String], code: &str) -> Vec<Name> {
    let tokens = tokens(code);
    let text = |i: usize| tokens.get(i).map_or("", |t| t.text.as_str());
    let mut inside = Inside::of([&["crate".to_owned()], module].concat());
    let (mut found, mut end) = (Vec::new(), 0);
    for i in 0..tokens.len() {
        inside.step(&tokens, i);
        let before = if i == 0 { "" } else { text(i - 1) };
        let begins = text(i).starts_with(|c: char| c.is_alphabetic() || c == '_');
        if i < end || !begins || ["::", ".", "'", "mod", "fn"].contains(&before) {
            continue;
        }
        let (first, site) = match (text(i), before) {
            ("use", "pub" | ")") => (i + 1, Site::Passed),
            ("use", _) => (i + 1, Site::Use),
            _ => (i, Site::Code),
        };
        if site == Site::Code && text(i + 1) != "::" && !is_used(text(i), before, text(i + 1)) {
            continue;
        }
        let mut paths = Vec::new();
        let last = follow(&tokens, first, &inside.modules, Vec::new(), &mut paths);
        // The `as` of a cast gives no name: the type after it is read as well.
        end = if site == Site::Code { i } else { last };
        let name = |Path { names: path, line, bound }| Name {
            path,
            bound,
            line,
            site,
            inside: !inside.inner.is_empty(),
        };
        found.extend(paths.into_iter().map(name));
    }
    found
}

/// Whether a single word looks like the name of a called function or of a type, and not like a variable, or a variant
/// or field of a list.
fn is_used(word: &str, before: &str, after: &str) -> bool {
    let listed = [",", "{", "}", "]"].contains(&before) && [",", "}", "="].contains(&after);
    after == "(" || word.starts_with(char::is_uppercase) && !listed
}

/// Follows the path at token `i`, with `prefix` before it; answers the token after it.
fn follow(
    tokens: &[Token],
    mut i: usize,
    modules: &[String],
    prefix: Vec<String>,
    found: &mut Vec<Path>,
) -> usize {
    let mut names = prefix;
    let mut line = tokens.get(i).map_or(0, |t| t.line);
    let mut bound = None;
    while let Some(token) = tokens.get(i) {
        match token.text.as_str() {
            "{" => {
                i += 1;
                while tokens.get(i).is_some_and(|t| t.text != "}") {
                    let end = follow(tokens, i, modules, names.clone(), found);
                    // A comma, or what no path holds: either is stepped over, so that the group ends.
                    let stepped = end == i || tokens.get(end).is_some_and(|t| t.text == ",");
                    i = end + usize::from(stepped);
                }
                return i + 1;
            }
            "super" if names.is_empty() => names.extend(up(modules)),
            "super" => {
                if names.len() > 1 {
                    names.pop();
                }
            }
            "self" if names.is_empty() => names.extend(modules.iter().cloned()),
            "self" => {}
            name if name.starts_with(is_word) || name == "*" => names.push(name.to_owned()),
            _ => break,
        }
        line = token.line;
        i += 1;
        match tokens.get(i).map(|t| t.text.as_str()) {
            Some("::") => i += 1,
            Some("as") => {
                bound = tokens.get(i + 1).map(|t| t.text.clone());
                i += 2;
                break;
            }
            _ => break,
        }
    }
    if let Some(last) = names.last() {
        let bound = bound.unwrap_or_else(|| last.clone());
        found.push(Path { names, line, bound });
    }
    i
}

/// The module above `modules`; the crate's root stays where it is.
fn up(modules: &[String]) -> Vec<String> {
    modules[..modules.len().saturating_sub(1).max(1)].to_vec()
}

/// The module that a file under `src/` holds: `src/os/map.rs` is `crate::os::map`.
fn module_of(file: &str) -> Vec<String> {
    let inside = file.trim_start_matches("src/").trim_end_matches(".rs");
    let names = inside.split('/').filter(|n| !matches!(*n, "mod" | "lib"));
    std::iter::once("crate").chain(names).map(str::to_owned).collect()
}
