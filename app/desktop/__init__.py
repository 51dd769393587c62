"""Between the app and the desktop: what is dropped and opened, notifications, the icon in the Dock or launcher."""
