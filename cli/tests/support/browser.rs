//! A headless Chromium, and the message of a test that skips without one.

#[path = "../../../tests/support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The path of Chromium. If it is not installed, the test prints that it skips, and returns.
pub fn chromium() -> Option<PathBuf> {
    let folders: Vec<PathBuf> = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    if let Some(program) = found.into_iter().find(|path| path.is_file()) {
        return Some(program);
    }
    skip::skip("chromium in PATH");
    None
}

/// The colour scheme in which a page is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Light {
    Dark,
    Bright,
}

/// Opens `page` in a window of `width` by `height`; returns the browser's standard output and standard error.
pub fn open(
    program: &Path,
    page: &Path,
    window: (u32, u32),
    light: Light,
    more: &[&str],
) -> (String, String) {
    let home = page.with_extension(format!("{}x{}.{}", window.0, window.1, light as u8));
    let scheme = if light == Light::Dark { 0 } else { 1 };
    let output = Command::new(program)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
        .args(["--disable-background-networking", "--enable-logging=stderr", "--force-device-scale-factor=1"])
        .arg(format!("--user-data-dir={}", home.display()))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--window-size={},{}", window.0, window.1))
        .args(more)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .expect("chromium runs");
    let _ = std::fs::remove_dir_all(&home);
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// The errors that the page reported while it was opened.
pub fn complaints(errors: &str) -> Vec<&str> {
    errors.lines().filter(|line| line.contains("CONSOLE") || line.contains("net::ERR")).collect()
}

/// A picture of the page: its width, its height, and its pixels in red, green, blue.
pub struct Shot {
    pub width: usize,
    pub height: usize,
    pub pixels: Vec<[u8; 3]>,
}

pub fn shot(program: &Path, page: &Path, window: (u32, u32), light: Light) -> Shot {
    let file = page.with_extension(format!("{}-{}.png", window.0, light as u8));
    let _ = std::fs::remove_file(&file);
    let (_, errors) = open(program, page, window, light, &[&format!("--screenshot={}", file.display())]);
    assert_eq!(complaints(&errors), Vec::<&str>::new());
    let picture = std::fs::File::open(&file).unwrap_or_else(|e| panic!("no screenshot: {e}\n{errors}"));
    let mut decoder = png::Decoder::new(std::io::BufReader::new(picture));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let samples = info.color_type.samples();
    assert!(samples >= 3, "a picture in colours");
    let pixels = bytes[..info.buffer_size()].chunks_exact(samples).map(|p| [p[0], p[1], p[2]]).collect();
    Shot { width: info.width as usize, height: info.height as usize, pixels }
}
