//! A picture of a page, for a document: `picture PAGE FILE.png WIDTH HEIGHT`. Chromium takes it; what is written
//! has the page's 256 most frequent colours, which is a third of the bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/support/browser.rs"]
mod browser;

use std::collections::HashMap;
use std::path::Path;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [page, file, width, height] = &arguments[..] else { panic!("PAGE FILE.png WIDTH HEIGHT") };
    let Some(program) = browser::chromium() else { std::process::exit(1) };
    let page = Path::new(page).canonicalize().unwrap();
    let window = (width.parse().unwrap(), height.parse().unwrap());
    let shot = browser::shot(&program, &page, window, browser::Light::Bright);

    let mut counts: HashMap<[u8; 3], usize> = HashMap::new();
    shot.pixels.iter().for_each(|pixel| *counts.entry(*pixel).or_default() += 1);
    let mut colours: Vec<[u8; 3]> = counts.keys().copied().collect();
    colours.sort_by_key(|colour| (std::cmp::Reverse(counts[colour]), *colour));
    let palette = &colours[..colours.len().min(256)];
    let far = |a: &[u8; 3], b: &[u8; 3]| -> i32 {
        a.iter().zip(b).map(|(a, b)| (i32::from(*a) - i32::from(*b)).pow(2)).sum()
    };
    let nearest = |colour| (0..palette.len()).min_by_key(|i| far(&palette[*i], colour)).unwrap() as u8;
    let known: HashMap<[u8; 3], u8> = colours.iter().map(|colour| (*colour, nearest(colour))).collect();
    let pixels: Vec<u8> = shot.pixels.iter().map(|pixel| known[pixel]).collect();

    let out = std::fs::File::create(file).unwrap();
    let mut encoder = png::Encoder::new(std::io::BufWriter::new(out), shot.width as u32, shot.height as u32);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(palette.concat());
    encoder.set_compression(png::Compression::High);
    encoder.set_filter(png::Filter::NoFilter);
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}
