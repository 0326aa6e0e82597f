//! Tests of the documentation's pictures in a browser, in light and in dark mode: no text touches another one, leaves
//! its picture, or has too little contrast with its background.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/browser.rs"]
mod browser;

use std::fs;
use std::path::{Path, PathBuf};

use browser::{Light, chromium, complaints, open, shot};
use serde_json::Value;

/// The pictures, by name.
fn pictures() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
    let files = fs::read_dir(folder.canonicalize().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let drawn = files.filter(|file| file.extension().is_some_and(|end| end == "svg"));
    let mut named: Vec<(String, PathBuf)> =
        drawn.map(|file| (file.file_name().unwrap().to_string_lossy().into_owned(), file)).collect();
    named.sort();
    assert!(named.len() >= 6, "{named:?}");
    named
}

/// A folder for one test only.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("figures").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A page that contains `body`, as wide as the column of a README.
fn page(body: &str) -> String {
    format!(
        "<!DOCTYPE html><html><head><meta charset=\"utf-8\"><meta name=\"color-scheme\" content=\"light dark\"></head>\
         <body style=\"margin:0;width:830px\">{body}</body></html>"
    )
}

/// Asks the browser about each text of each picture: whether it is inside its picture and overlaps no other, and its
/// contrast with the background below it (the ratio of WCAG; body text needs 4.5).
const LOOK: &str = "<script>
    const found = { texts: 0, out: [], over: [], pale: [] };
    const numbers = text => text.match(/[0-9.]+/g).map(Number);
    const colour = text => [...numbers(text).slice(0, 3), numbers(text)[3] ?? 1];
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = rgb => rgb.slice(0, 3).map(c => linear(c / 255))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const beneath = (x, y) => document.elementsFromPoint(x, y).filter(e => e.matches('rect, circle, path')).reverse()
        .map(e => getComputedStyle(e)).filter(style => style.fill !== 'none')
        .reduce((under, style) => {
            const [r, g, b, a] = colour(style.fill), over = a * style.fillOpacity;
            return [r, g, b].map((c, i) => c * over + under[i] * (1 - over));
        }, [255, 0, 255]);
    for (const picture of document.querySelectorAll('svg')) {
        const frame = picture.getBoundingClientRect(), name = picture.querySelector('title').textContent + ': ';
        const texts = [...picture.querySelectorAll('text')].map(t => [t, t.textContent, t.getBoundingClientRect()]);
        found.texts += texts.length;
        texts.forEach(([element, text, a], i) => {
            if (a.left < frame.left + 4 || a.right > frame.right - 4 || a.top < frame.top || a.bottom > frame.bottom)
                found.out.push(name + text);
            for (const [, other, b] of texts.slice(i + 1))
                if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
                    found.over.push(name + text + ' | ' + other);
            const ground = light(beneath((a.left + a.right) / 2, (a.top + a.bottom) / 2));
            const ink = light(colour(getComputedStyle(element).fill));
            const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
            if (ratio < 4.5) found.pale.push(name + text + ' ' + ratio.toFixed(1));
        });
    }
    document.body.dataset.found = JSON.stringify(found).replace(/[<&]/g, '');
</script>";

/// The result of [`LOOK`].
fn looked(program: &Path, pictures: &str, folder: &Path, light: Light) -> Value {
    let file = folder.join("look.html");
    fs::write(&file, page(&format!("{pictures}{LOOK}"))).unwrap();
    let (dom, errors) = open(program, &file, (900, 6000), light, &["--dump-dom"]);
    assert_eq!(complaints(&errors), Vec::<&str>::new());
    let text = dom.split("data-found=\"").nth(1).and_then(|rest| rest.split('"').next());
    serde_json::from_str(&text.unwrap().replace("&quot;", "\"")).unwrap_or_else(|e| panic!("{e}: {dom}"))
}

#[test]
fn every_text_of_a_picture_has_room_and_can_be_read() {
    let Some(program) = chromium() else { return };
    let folder = folder("texts");
    let all: String = pictures().iter().map(|(_, file)| fs::read_to_string(file).unwrap()).collect();
    for light in [Light::Bright, Light::Dark] {
        let found = looked(&program, &all, &folder, light);
        assert_eq!(found["texts"].as_u64().unwrap() as usize, all.matches("<text").count());
        for kind in ["out", "over", "pale"] {
            assert_eq!(found[kind].as_array().unwrap().len(), 0, "{kind}: {}", found[kind]);
        }
    }
}

#[test]
fn control_the_browser_finds_faults_of_a_picture() {
    let Some(program) = chromium() else { return };
    let wrong = "<svg viewBox=\"0 0 400 100\" width=\"400\"><title>a</title><rect width=\"400\" height=\"100\" \
                 fill=\"#fffefb\"/><text x=\"10\" y=\"20\">over</text><text x=\"12\" y=\"20\">lying</text>\
                 <text x=\"380\" y=\"40\">outside</text><text x=\"10\" y=\"80\" fill=\"#bbbbbb\">pale</text></svg>";
    let found = looked(&program, wrong, &folder("control"), Light::Bright);
    assert_eq!(found["over"], serde_json::json!(["a: over | lying"]));
    assert_eq!(found["out"], serde_json::json!(["a: outside"]));
    assert!(found["pale"].to_string().contains("a: pale 1."), "{found}");
    assert_eq!(found["pale"].as_array().unwrap().len(), 1, "{found}");
}

/// Between 0 (black) and 1.
fn lightness(pixel: [u8; 3]) -> f64 {
    let [r, g, b] = pixel.map(f64::from);
    (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255.0
}

#[test]
fn a_picture_in_a_page_follows_light_and_dark_mode() {
    const HIGH: usize = 700;
    let Some(program) = chromium() else { return };
    let (file, pictures) = (folder("lights").join("page.html"), pictures());
    let shown = pictures
        .iter()
        .map(|(_, file)| format!("<div style=\"height:{HIGH}px\"><img src=\"{}\"></div>", file.display()));
    fs::write(&file, page(&shown.collect::<String>())).unwrap();
    for light in [Light::Bright, Light::Dark] {
        let shot = shot(&program, &file, (720, (HIGH * pictures.len()) as u32), light);
        assert_eq!((shot.width, shot.height), (720, HIGH * pictures.len()));
        for ((name, _), pixels) in pictures.iter().zip(shot.pixels.chunks(720 * HIGH)) {
            let mean = pixels.iter().map(|pixel| lightness(*pixel)).sum::<f64>() / pixels.len() as f64;
            let paper = lightness(pixels[8 * 720 + 360]);
            match light {
                Light::Bright => assert!(mean > 0.8 && paper > 0.95, "{name}: {mean} {paper}"),
                Light::Dark => assert!(mean < 0.3 && paper < 0.12, "{name}: {mean} {paper}"),
            }
            let mut colours = pixels.to_vec();
            colours.sort_unstable();
            colours.dedup();
            assert!(colours.len() > 50, "{name}: {} colours", colours.len());
        }
    }
}
