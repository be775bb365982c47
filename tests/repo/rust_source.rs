//! Reads just enough Rust to know which paths a file names: no types, no macros, no regular expressions.

/// The code without comments, literals and test modules.
pub fn code(source: &str) -> Vec<String> {
    without_tests(&tokens(source)).into_iter().filter(|token| !token.starts_with('"')).collect()
}

/// The string literals outside test modules, each with a quote in front.
pub fn strings(source: &str) -> Vec<String> {
    without_tests(&tokens(source)).into_iter().filter(|token| token.starts_with('"')).collect()
}

/// The code without comments and test modules; a string is one token, with its quotes.
pub fn code_with_strings(source: &str) -> Vec<String> {
    without_tests(&tokens(source))
}

/// Every path the code names, `use` trees taken apart, `self` and `super` resolved from `module`,
/// and what begins with an imported module written out.
pub fn paths(code: &[String], module: &[String]) -> Vec<Vec<String>> {
    let (mut imports, mut inline) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < code.len() {
        // `use<'a>` in a return type is no import.
        if code[at] == "use" && code.get(at + 1).is_some_and(|next| next != "<") {
            at = tree(code, at + 1, &mut Vec::new(), &mut imports);
        } else if is_word(&code[at]) && code.get(at + 1).is_some_and(|next| next == "::") {
            let mut path = vec![code[at].clone()];
            while code.get(at + 1).is_some_and(|next| next == "::")
                && code.get(at + 2).is_some_and(|next| is_word(next))
            {
                path.push(code[at + 2].clone());
                at += 2;
            }
            inline.push(path);
            at += 1;
        } else {
            at += 1;
        }
    }
    let imports: Vec<_> = imports.iter().map(|path| resolved(path, module)).collect();
    let mut found = imports.clone();
    for path in inline {
        let import = imports.iter().find(|import| import.len() > 1 && import.last() == path.first());
        let whole = import.map(|import| import.iter().chain(&path[1..]).cloned().collect());
        found.push(whole.unwrap_or_else(|| resolved(&path, module)));
    }
    found
}

/// One `use` tree from `at`; returns where it ends.
fn tree(code: &[String], mut at: usize, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> usize {
    let depth = prefix.len();
    while at < code.len() {
        match code[at].as_str() {
            "{" => {
                at = tree(code, at + 1, prefix, found);
                // The group ends this branch: what it held is found already.
                prefix.truncate(depth);
                if code.get(at).is_some_and(|token| token == ";") {
                    return at;
                }
            }
            token @ ("," | "}" | ";") => {
                if prefix.len() > depth {
                    found.push(prefix.clone());
                }
                prefix.truncate(depth);
                at += 1;
                if token != "," {
                    return at;
                }
            }
            "as" => at += 2,
            "::" => at += 1,
            word => {
                // `a::{self}` is `a`.
                if word == "self" && !prefix.is_empty() {
                    found.push(prefix.clone());
                } else {
                    prefix.push(word.to_owned());
                }
                at += 1;
            }
        }
    }
    at
}

fn resolved(path: &[String], module: &[String]) -> Vec<String> {
    let mut here = module.to_vec();
    let mut rest = path;
    match rest.first().map(String::as_str) {
        Some("self") => rest = &rest[1..],
        Some("super") => {
            while rest.first().is_some_and(|word| word == "super") {
                here.pop();
                rest = &rest[1..];
            }
        }
        Some(_) | None => return path.to_vec(),
    }
    ["crate".to_owned()].into_iter().chain(here).chain(rest.iter().cloned()).collect()
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn tokens(source: &str) -> Vec<String> {
    let chars: Vec<char> = source.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let next = chars.get(at + 1).copied();
        match chars[at] {
            '/' if next == Some('/') => at = find(&chars, at, |c| c == '\n'),
            '/' if next == Some('*') => at = after_comment(&chars, at),
            '"' => {
                let end = after_string(&chars, at);
                tokens.push(chars[at..end.min(chars.len())].iter().collect());
                at = end;
            }
            'r' | 'b' if starts_raw(&chars, at) => {
                let end = after_raw(&chars, at);
                tokens.push(['"'].iter().chain(&chars[at..end.min(chars.len())]).collect());
                at = end;
            }
            '\'' => at = after_quote(&chars, at),
            ':' if next == Some(':') => {
                tokens.push("::".to_owned());
                at += 2;
            }
            c if c.is_alphanumeric() || c == '_' => {
                let end = find(&chars, at, |c| !(c.is_alphanumeric() || c == '_'));
                tokens.push(chars[at..end].iter().collect());
                at = end;
            }
            c => {
                if !c.is_whitespace() {
                    tokens.push(c.to_string());
                }
                at += 1;
            }
        }
    }
    tokens
}

fn find(chars: &[char], from: usize, stop: impl Fn(char) -> bool) -> usize {
    (from..chars.len()).find(|at| stop(chars[*at])).unwrap_or(chars.len())
}

fn after_comment(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn after_string(chars: &[char], mut at: usize) -> usize {
    at += 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

fn starts_raw(chars: &[char], at: usize) -> bool {
    let hashes = find(chars, at, |c| c != 'r' && c != 'b');
    let quote = find(chars, hashes, |c| c != '#');
    hashes - at <= 2 && chars[at..hashes].contains(&'r') && chars.get(quote) == Some(&'"')
}

fn after_raw(chars: &[char], at: usize) -> usize {
    let hashes = find(chars, at, |c| c == '#' || c == '"');
    let open = find(chars, hashes, |c| c == '"');
    let count = open - hashes;
    let mut end = open + 1;
    while end < chars.len() {
        if chars[end] == '"' && chars[end + 1..].iter().take_while(|c| **c == '#').count() >= count {
            return end + 1 + count;
        }
        end += 1;
    }
    end
}

/// A character, or the tick of a lifetime.
fn after_quote(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => find(chars, at + 3, |c| c == '\'') + 1,
        (Some(_), Some('\'')) => at + 3,
        _ => at + 1,
    }
}

/// Drops every item marked `#[cfg(test)]`: a module with its body, or anything up to its `;`.
fn without_tests(tokens: &[String]) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].iter().take(MARK.len()).eq(MARK.iter()) {
            at += MARK.len();
            let mut depth = 0;
            while at < tokens.len() {
                match tokens[at].as_str() {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
                at += 1;
                if depth == 0 && matches!(tokens[at - 1].as_str(), "}" | ";") {
                    break;
                }
            }
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}
