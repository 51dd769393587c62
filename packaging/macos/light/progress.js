// The window of the first start: osascript -l JavaScript progress.js FOLDER LOG ICON
//
// Before Python is there, osascript is what every Mac has that can show a window. It draws what set_up.sh writes into FOLDER/state
// (working, finished or failed, and a sentence) and, smaller, the last line of LOG. It ends when the state is finished or failed, or when
// Cancel is pressed, which leaves the file FOLDER/cancel for launch.sh to find.

ObjC.import("Cocoa");

const WIDTH = 440;
const HEIGHT = 128;
const MARGIN = 20;
const ICON = 56;
const EVERY_S = 0.2;

function run(argv) {
  const [folder, log, icon] = argv;
  const app = $.NSApplication.sharedApplication;
  app.setActivationPolicy($.NSApplicationActivationPolicyRegular);
  app.setApplicationIconImage($.NSImage.alloc.initWithContentsOfFile(icon));

  const parts = buildWindow(icon);
  ObjC.registerSubclass({
    name: "SetUpController",
    methods: {
      "tick:": {
        types: ["void", ["id"]],
        implementation: () => {
          const [state, sentence] = lines(`${folder}/state`);
          if (state === "finished" || state === "failed") app.terminate($());
          parts.sentence.stringValue = sentence || "";
          parts.detail.stringValue = lines(log).pop() || "";
        },
      },
      "cancel:": {
        types: ["void", ["id"]],
        implementation: () => {
          $("").writeToFileAtomicallyEncodingError(`${folder}/cancel`, true, $.NSUTF8StringEncoding, $());
          app.terminate($());
        },
      },
    },
  });
  const controller = $.SetUpController.alloc.init;
  parts.cancel.target = controller;
  parts.cancel.action = "cancel:";
  $.NSTimer.scheduledTimerWithTimeIntervalTargetSelectorUserInfoRepeats(EVERY_S, controller, "tick:", $(), true);
  app.activateIgnoringOtherApps(true);
  app.run;
}

// The parts of the window that change: sentence, detail, cancel.
function buildWindow(icon) {
  const frame = $.NSMakeRect(0, 0, WIDTH, HEIGHT);
  const window = $.NSWindow.alloc.initWithContentRectStyleMaskBackingDefer(
    frame, $.NSWindowStyleMaskTitled, $.NSBackingStoreBuffered, false,
  );
  window.title = "Setting up GRPO Studio";
  const left = MARGIN + ICON + 16;
  const wide = WIDTH - left - MARGIN;

  const picture = $.NSImageView.alloc.initWithFrame($.NSMakeRect(MARGIN, HEIGHT - MARGIN - ICON, ICON, ICON));
  picture.image = $.NSImage.alloc.initWithContentsOfFile(icon);
  const sentence = label($.NSMakeRect(left, HEIGHT - MARGIN - 20, wide, 20), $.NSFont.systemFontOfSize(13));
  const bar = $.NSProgressIndicator.alloc.initWithFrame($.NSMakeRect(left, HEIGHT - MARGIN - 44, wide, 16));
  bar.startAnimation($()); // without end: neither pip nor uv says how much is still to come
  const detail = label($.NSMakeRect(left, HEIGHT - MARGIN - 64, wide, 16), $.NSFont.systemFontOfSize(11));
  detail.textColor = $.NSColor.secondaryLabelColor;
  const cancel = $.NSButton.alloc.initWithFrame($.NSMakeRect(WIDTH - MARGIN - 90, 12, 96, 28));
  cancel.title = "Cancel";
  cancel.bezelStyle = $.NSBezelStyleRounded;
  cancel.keyEquivalent = "\u001b"; // Escape

  for (const part of [picture, sentence, bar, detail, cancel]) window.contentView.addSubview(part);
  window.center;
  window.makeKeyAndOrderFront($());
  return { sentence, detail, cancel };
}

function label(frame, font) {
  const made = $.NSTextField.alloc.initWithFrame(frame);
  made.editable = false;
  made.bezeled = false;
  made.drawsBackground = false;
  made.font = font;
  made.lineBreakMode = $.NSLineBreakByTruncatingTail;
  return made;
}

// The lines of a text file that are not empty; none where it cannot be read.
function lines(path) {
  const text = ObjC.unwrap($.NSString.stringWithContentsOfFileEncodingError(path, $.NSUTF8StringEncoding, $()));
  return (text || "").split("\n").filter((line) => line.trim() !== "");
}
